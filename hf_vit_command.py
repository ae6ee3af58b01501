"""What the command `hf-vit` runs.

It stands beside the package, since importing anything of `hf_vit` runs `hf_vit/__init__.py` first: that registers the
Auto classes, for which it imports torch, unless it is this command that imports it. So `hf-vit --help` is quick.
"""

is_running = False


def main() -> int:
    """Run one command; see `hf_vit.cli`."""
    global is_running
    is_running = True
    from hf_vit.cli import main

    return main()
