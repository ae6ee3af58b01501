"""Progress bars of other libraries."""


def silence_progress_bars() -> None:
    """Disable transformers' progress bars, which last a fraction of a second; downloads keep theirs."""
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # also disables the bars of downloads
    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
