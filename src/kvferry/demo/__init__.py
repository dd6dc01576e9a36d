"""The demo: a request prefilled in one process and decoded on in another, compared with one process."""

from kvferry.demo.records import DemoOptions, DemoResult, DemoTimings
from kvferry.demo.run import run_demo

__all__ = ["DemoOptions", "DemoResult", "DemoTimings", "run_demo"]
