"""Model families: fields, rope rule, media tokens, cost coefficients, runners."""

if __name__ != "evenpack.models":
    raise ImportError("import this folder as evenpack.models: under its bare name a second copy of every class would appear")
