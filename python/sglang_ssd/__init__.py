"""SGLang with native Speculative Speculative Decoding."""

__version__ = "0.1.0"
