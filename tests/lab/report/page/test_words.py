"""The little Markdown of configs becomes HTML, and nothing in it becomes a tag of its own."""

from __future__ import annotations

from maecho.lab.report.page.words import line, paragraphs


def test_words_become_html() -> None:
    assert paragraphs("One `code`,\nand **two `b`**.\n\n\n- a\n- b\n  c\n") == (
        "<p>One <code>code</code>, and <strong>two <code>b</code></strong>.</p><ul><li>a</li><li>b c</li></ul>"
    )
    assert paragraphs("") == ""
    assert line("see [the `page`](page.md#x), or [this](https://example.org)") == "see the <code>page</code>, or this"
    assert line("a * b, 2 ** 3, `") == "a * b, 2 ** 3, `"
    assert line("<b> `<i>` **<u>** [<s>](javascript:x)") == (
        "&lt;b&gt; <code>&lt;i&gt;</code> <strong>&lt;u&gt;</strong> &lt;s&gt;"
    )
