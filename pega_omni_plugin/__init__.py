"""Low-latency speech, full-duplex live voice and images for vLLM-Omni and NVIDIA Dynamo."""

__version__ = "0.1.0"
