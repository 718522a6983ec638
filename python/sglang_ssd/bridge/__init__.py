"""Every seam of SGLang 0.5.23, as thin bases that the other packages build on.

No other package of this project imports sglang. Importing ``sglang_ssd.bridge`` itself imports nothing heavy:
``bridge.environment`` must run before the first import of sglang.
"""
