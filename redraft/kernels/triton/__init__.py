"""The same operations as Triton kernels, one file each: the kernel, and a function that launches it.

Nothing here is imported before a GPU is there to run it, or Triton's interpreter to test it: Triton takes long to import.
"""
