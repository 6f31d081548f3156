"""The output ring keeps the last lines in bounded memory, whatever is printed."""

from __future__ import annotations

from gpu_turnstile.runtimes.ring import LINE_BYTES, LINE_CHARS, LINES, OutputRing


def fed(*chunks):
    ring = OutputRing()
    for chunk in chunks:
        ring.feed(chunk)
    return ring


def test_lines_are_kept_oldest_first_with_the_unfinished_one():
    assert fed(b"one\ntw", b"o\nthr").lines() == ("one", "two", "thr")


def test_only_the_last_lines_are_kept():
    lines = fed(*(b"%d\n" % n for n in range(1000))).lines()
    assert len(lines) == LINES
    assert lines[-1] == "999"
    assert fed(b"\n".join(b"%d" % n for n in range(1000))).lines()[-1] == "999"


def test_a_line_without_end_takes_bounded_memory_and_the_next_line_is_whole():
    ring = fed(*[b"x" * 65536] * 100)
    assert len(ring._unfinished) <= LINE_BYTES
    ring.feed(b"tail\nnext\n")
    assert ring.lines() == ("x" * LINE_CHARS, "next")


def test_characters_cut_between_two_reads_are_whole():
    text = "größe\n".encode()
    assert fed(*(text[i : i + 1] for i in range(len(text)))).lines() == ("größe",)


def test_bytes_that_are_no_text_do_not_hurt():
    assert fed(b"\xff\xfe\n").lines() == ("\ufffd\ufffd",)


def test_a_progress_bar_is_its_last_state():
    assert fed(b"loading 1%\r", b"loading 50%\r", b"loading 100%").lines() == ("loading 100%",)
    assert fed(b"loading 1%\rloading 9%\r").lines() == ("loading 9%",)
    assert fed(b"dos\r\nline\r\n").lines() == ("dos", "line")


def test_colours_are_left_out():
    assert fed(b"\x1b[1;31merror\x1b[0m: no\n").lines() == ("error: no",)


def test_the_last_line_is_the_last_that_says_something():
    assert fed(b"cannot allocate\n\n  \n").last() == "cannot allocate"
    assert fed().last() == ""
