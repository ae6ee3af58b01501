"""Metrics as a table for people."""

from hf_vit.evaluation.protocols import summarize


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
    values = [line.rpartition("  ")[2] for line in summarize(metrics).splitlines()]
    assert values == ["0.1235", "95.83%", "1,234", "1024", "25.00%", "20.00%, 30.00%", "50.00%", "-"]
