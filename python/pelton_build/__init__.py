"""Decides what a wheel is: profile, toolchain and choices in; a plan that CMake carries out, out.

Only the standard library is needed for that. Nothing here imports torch or the package that is built.
"""
