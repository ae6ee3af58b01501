"""Entry point of the command `hf-vit`.

It is outside of the package to keep `hf-vit --help` quick: importing any module of `hf_vit` runs `hf_vit/__init__.py`,
which imports torch to register the Auto classes, unless this command imports it.
"""

import gc

is_running = False


def main() -> int:
    """Run one command; see `hf_vit.cli`."""
    global is_running
    is_running = True
    # torch and transformers create 660,000 objects that live until the end; Python would visit them all several times.
    gc.set_threshold(50_000)
    from hf_vit.cli import main

    return main()
