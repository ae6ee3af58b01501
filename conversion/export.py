"""Write a saved folder as an original JAX checkpoint: the same as `hf-vit export`."""

import sys

from hf_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
