"""Train a Vision Transformer from random weights, with labels or by masked patch prediction.

    accelerate launch training/pretrain.py --recipe training/recipes/digits.yaml --output_dir out
"""

from hf_vit.training.commands import main, pretrain

if __name__ == "__main__":
    main(pretrain)
