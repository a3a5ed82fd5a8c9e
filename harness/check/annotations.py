"""Lines of a log that GitHub shows beside a pull request: `::error file=…,line=…,title=…::message`.

What stands in them comes from trees and exceptions that others wrote, so each part is escaped as GitHub reads it back: no text
ends the line, or a property, before its end.
"""


def error(message: str, title: str, file: str = "", line: int = 0) -> str:
    """An error, at a line of a file if one is named."""
    where = [f"file={_property(file)}"] if file else []
    where += [f"line={line}"] if file and line else []
    return f"::error {','.join([*where, f'title={_property(title)}'])}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
