from services.standalone.logs import MAX_LINE_BYTES, TAIL_LINES, LineSplitter, ProcessLog


def test_lines_come_out_whole_however_the_bytes_are_cut():
    text = "one\ntwo\r\nthrée\rfour".encode()
    for cut in range(len(text)):
        splitter = LineSplitter()
        lines = splitter.feed(text[:cut]) + splitter.feed(text[cut:]) + splitter.flush()
        assert lines == ["one", "two", "thrée", "four"]


def test_line_without_end_is_cut_instead_of_growing():
    splitter = LineSplitter()
    assert len(splitter.feed(b"x" * (MAX_LINE_BYTES + 1))[0]) == MAX_LINE_BYTES + 1
    assert splitter.flush() == []


def test_log_goes_to_its_file_and_the_sink_and_keeps_the_last_lines(tmp_path):
    seen = []
    log = ProcessLog("hub", tmp_path, lambda name, line: seen.append((name, line)))
    lines = [f"line {number}" for number in range(TAIL_LINES + 5)]
    log.write("\n".join(lines).encode())
    log.close()
    assert log.path.read_text().splitlines() == lines
    assert seen == [("hub", line) for line in lines]
    assert log.last_lines == lines[-TAIL_LINES:]


def test_second_life_is_appended_to_the_first_ones_log(tmp_path):
    for text in (b"first\n", b"second\n"):
        log = ProcessLog("hub", tmp_path, lambda name, line: None)
        log.write(text)
        log.close()
    assert log.path.read_text() == "first\nsecond\n"
