"""Commands."""

if __name__ != "evenpack.cli":
    raise ImportError("import this folder as evenpack.cli: under its bare name a second copy of every class would appear")
