"""Kernels of sglang-ssd.

Every python start imports this package (see ``cpu_stand_in``), so it imports nothing itself.
"""
