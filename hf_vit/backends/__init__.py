"""What computes a forward in place of torch: OpenVINO and ONNX Runtime.

A backend answers for the forward of the whole model, on the instance, as `models/inference.py` does for single modules:
`use_backend` puts a `BackendForward` there, and `train()` takes it back. What it cannot do is left to torch.
"""
