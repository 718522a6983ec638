"""GPU kernels in Triton, with the operations of ``cpu`` and those that only pay on a GPU.

Modules import ``triton`` when they are imported; nothing else of this package imports them before a tensor on a GPU asks
for them. With ``TRITON_INTERPRET=1`` in the environment before that, they take CPU tensors: so they are tested.
"""
