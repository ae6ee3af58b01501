"""What tests read off an HTML page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page, its text, and its tables as rows of cells."""

    def __init__(self, html: str):
        super().__init__()
        self.tables, self.elements, self.texts, self.in_cell = [], [], [], False
        self.feed(html)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.in_cell = tag in ("td", "th")

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        self.texts.append(data)
        if self.in_cell:
            self.tables[-1][-1][-1] += data.strip()

    def table(self, *head: str) -> list[list[str]]:
        """The rows below those headings."""
        return next(rows[1:] for rows in self.tables if rows and rows[0][: len(head)] == list(head))
