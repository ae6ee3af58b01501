"""Convert an original JAX checkpoint to a folder that `from_pretrained` loads: the same as `hf-vit convert`."""

import sys

from hf_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
