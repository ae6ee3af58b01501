"""Backends that compute a forward in place of torch: OpenVINO and ONNX Runtime.

`use_backend` replaces the forward of a model, on the instance, by a `BackendForward`; `train()`
restores it. Calls that a backend cannot compute go to torch.
"""
