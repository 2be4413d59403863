"""The scheduler: gather, plan, exchange, pack and yield, once per optimizer step."""

if __name__ != "evenpack.scheduler":
    raise ImportError("import this folder as evenpack.scheduler: under its bare name a second copy of every class would appear")
