"""Kernels in OpenAI Triton, one file an operator: the kernel, how it is specialised, a launcher.

A kernel's parameters stand in the order inputs, integers, outputs, as TensorRT passes them; none of
its integers is specialised for, so that the kernel that torch launches is the one TensorRT gets.
"""
