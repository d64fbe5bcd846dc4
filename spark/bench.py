"""Spark's benchmark under its public name, `python -m portalmq.spark.bench`. The code is in broker/bench/spark.py."""

from runpy import run_module

if __name__ == "__main__":
    run_module("portalmq.broker.bench.spark", run_name="__main__", alter_sys=True)
