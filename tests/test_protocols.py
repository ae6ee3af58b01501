"""Metrics as a table for people."""

from hf_vit.protocols import summarize


def test_numbers_of_every_protocol():
    metrics = {
        "loss": 0.123456,
        "accuracy": 0.9583,
        "samples": 1234,
        "skipped": 0,
        "few_shot": [{"shots": 5, "l2_reg": 1024.0, "accuracy": 0.25, "spread": [0.2, 0.3]}],
        "held_out_accuracy": {"0.1": 0.5},
        "groups": {"natural": None},
    }
    table = dict(line.rsplit("  ", 1) for line in summarize(metrics).splitlines())
    assert {name.strip(): value for name, value in table.items()} == {
        "loss": "0.1235",
        "accuracy": "95.83%",
        "images": "1,234",
        "5 shots l2 reg": "1024",
        "5 shots accuracy": "25.00%",
        "5 shots spread": "20.00%, 30.00%",
        "held out accuracy 0.1": "50.00%",
        "groups natural": "-",
    }
