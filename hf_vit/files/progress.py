"""Progress bars of others, beside ours."""


def silence_progress_bars() -> None:
    """Those of transformers, over a fraction of a second; downloads keep theirs."""
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # which disables those of downloads too
    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
