"""All GPU tables, by `python -m benchmarks.gpu`; the options stand in `bench`."""

from benchmarks.gpu.bench import main

main()
