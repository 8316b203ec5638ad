"""How a stock SGLang is started from the run file, on GPUs and on a CPU.

Owns the command line and environment of one engine, and the stand-ins for packages without a CPU build. Imports no SGLang: the
process replaces itself with `python -m sglang.launch_server`.
"""
