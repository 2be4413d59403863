"""Bridges to training frameworks; nothing in the package imports from here."""

if __name__ != "evenpack.integrations":
    raise ImportError(
        "import this folder as evenpack.integrations: under its bare name a second copy of every class would appear"
    )
