"""Messages of errors, on one line."""

from hf_vit.files.messages import format_error


def test_a_long_name_does_not_hide_the_rest():
    name = "https://host/" + "x" * 30_000
    message = format_error(ValueError(f"{name}?token=hidden is not in {'y' * 30_000}, in big.npz"))
    assert len(message) < 1000
    assert message.endswith("big.npz")
    assert "hidden" not in message
