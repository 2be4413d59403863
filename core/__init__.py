"""Errors, field declarations and the sample layout: what every other folder speaks in."""

if __name__ != "evenpack.core":
    raise ImportError("import this folder as evenpack.core: under its bare name a second copy of every class would appear")
