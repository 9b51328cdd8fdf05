"""The rules ``ifbench`` and ``ifbench_loose``. The response must follow every verifiable instruction of its row.

The row's metadata (or its label, as JSON) has the instructions, as in the data sets IFEval and IFBench:
``instruction_id_list`` is a list of ids, and ``kwargs`` is a list with a dict of arguments for each id. There are
IFEval's 25 checks (in `instructions`) and IFBench's own 58 checks (in this file; Pyatkin et al., arXiv:2507.02833). An
instruction without a check raises an error. The verdicts equal the verdicts of IFBench's own code, even where that code
is odd. The verdicts may differ only where `instructions` approximates English (docs/rewards.md lists the differences).
In the arguments of an instruction, positions are counted from 1, but the words of a span are counted from 0.
"""

from __future__ import annotations

import csv
import io
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, takewhile

from slimelite.contrib.instructions import (
    CAPITALS,
    CHECKS,
    NAMES,
    PRONOUNS,
    STOP_WORDS,
    Check,
    count_words,
    is_emoji,
    is_verb,
    sentences,
    syllables,
    tokens,
    whole_words,
    word_tokens,
)
from slimelite.rewards.rules import Answer

MARKS = string.punctuation
EDGES = MARKS + " "
NO_MARKS = str.maketrans("", "", MARKS)
PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))
CONJUNCTIONS = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
# number of days of each month; there is no month 0, but IFBench accepts it
DAYS = (31, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
BRACKETS = {")": "(", "]": "[", "}": "{"}


def plain_words(text: str) -> list[str]:
    """The words of the text without punctuation. A word that is only punctuation is left out."""
    return text.translate(NO_MARKS).split()


def rising(numbers: Iterable[int]) -> bool:
    """Whether each number is greater than the number before."""
    return all(a < b for a, b in pairwise(numbers))


def ascii_letters(text: str) -> str:
    """``text`` without accents."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def ends(text: str, mark: str) -> int:
    """The number of sentences that end with ``mark``."""
    return sum(sentence.endswith(mark) for sentence in sentences(text))


def nth_sentence(text: str, n: float) -> str:
    """The n-th sentence, counted from 1. Returns an empty text if there is no such sentence."""
    return "".join(sentences(text)[int(n) - 1 : int(n)])


def stop_words(text: str, percentage: float) -> bool:
    """Whether at most ``percentage`` percent of the words are stop words."""
    words = re.findall(r"\w+", text.lower())
    return len(words) > 0 and 100 * sum(word in STOP_WORDS for word in words) <= percentage * len(words)


def overlap(text: str, reference_text: str, percentage: float) -> bool:
    """Whether ``percentage`` percent (± 2) of the text's token trigrams are in the reference."""
    trigrams, reference = ({*zip(t, t[1:], t[2:], strict=False)} for t in (tokens(text), tokens(reference_text)))
    return bool(trigrams) and abs(100 * len(trigrams & reference) / len(trigrams) - percentage) <= 2


def sentence_words(text: str) -> bool:
    """Whether there are three sentences with the same number of characters, and no word occurs twice."""
    parts, words = sentences(text), plain_words(text.lower())
    return len(parts) == 3 and len({*map(len, parts)}) == 1 and len(words) == len({*words})


def punctuation(text: str) -> bool:
    """Whether the text has each of ``. , ! ? ; :`` and also a separate interrobang (``?!``, ``!?`` or ``‽``)."""
    if not any(mark in text for mark in ("?!", "!?", "‽")):
        return False
    rest = text.replace("?!", "", 1) if "?!" in text else text.replace("!?", "", 1)
    return set(".,!?;:") <= set(rest)


def words_japanese(text: str, N: int) -> bool:
    """Whether every N-th word has kana or kanji. Numbers and words of only punctuation are accepted too."""
    words = [word.strip(EDGES) for word in text.split()[int(N) - 1 :: int(N)]]
    return all(re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", word) for word in words if word and not word.isdigit())


def keywords_multiple(text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    """Whether ``keyword1`` occurs once, ``keyword2`` twice, ``keyword3`` three times, ``keyword4`` five times and
    ``keyword5`` seven times."""
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(whole_words(text, keyword.strip()) == count for keyword, count in wanted)


def alphabet(text: str) -> bool:
    """Whether the first letters of the words follow the alphabet, as in "great huge icy". After "z" comes "a"."""
    firsts = "".join(word[0].lower() for word in plain_words(text))
    start = string.ascii_lowercase.find(firsts[:1]) if firsts else -1
    return start >= 0 and firsts == (string.ascii_lowercase * (len(firsts) // 26 + 2))[start : start + len(firsts)]


def paragraph_last_first(text: str) -> bool:
    """Whether each line begins and ends with the same word."""
    lines = [line.strip().strip(EDGES).split() for line in text.lower().split("\n")]
    return all(words[0] == words[-1] for words in lines if words)


def last_first(text: str) -> bool:
    """Whether each sentence begins with the last word of the sentence before."""
    parts = [sentence.lower() for sentence in sentences(text)]
    joints = [(a.rstrip(EDGES).split()[-1:], b.lstrip(EDGES).split()[:1]) for a, b in pairwise(parts)]
    return all(last and last == first for last, first in joints)


def words_position(text: str, keyword: str) -> bool:
    """Whether the keyword is the second word and also the second-last word."""
    words = [word.lower() for word in word_tokens(text)]
    return len(words) > 1 and words[1] == words[-2] == keyword.strip().lower()


def alliteration(sentence: str) -> int:
    """The number of words of a sentence that have the same first letter as a word next to them."""
    firsts = "".join(word[0] for part in sentence.lower().split() if (word := part.lstrip(EDGES)))
    return sum(len(run[0]) for run in re.finditer(r"(.)\1+", firsts))


def parentheses(text: str) -> bool:
    """Whether brackets are nested five levels deep and the innermost bracket is closed. A closing bracket that does not
    match restarts the count."""
    stack: list[str] = []
    deepest = 0
    for char in text:
        if char in BRACKETS.values():
            stack.append(char)
            deepest = max(deepest, len(stack))
        elif char in BRACKETS and stack and stack[-1] == BRACKETS[char]:
            stack.pop()
            if deepest >= 5:
                return True
        elif char in BRACKETS:
            stack, deepest = [], 0
    return False


def quotes(text: str) -> bool:
    """Whether double and single quotes are nested three levels deep and closed again."""
    stack: list[str] = []
    deepest = 0
    for char in text:
        if stack and char == stack[-1]:
            stack.pop()
            if deepest - len(stack) >= 3:
                return True
        elif char in "\"'":
            stack.append(char)
            deepest = max(deepest, len(stack))
    return False


def options(text: str, options: str) -> bool:
    """Whether the text is one of the options. If the options are the letters a, b, c and so on, the text must equal an
    option exactly. For all other options, the comparison ignores case and surrounding punctuation."""
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    choices = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]", options):
        return text in choices
    return text.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in choices]


def emoji(text: str) -> bool:
    """Whether every sentence has an emoji at its end or directly after it. An emoji after a sentence is the start of
    the next sentence."""
    parts = [sentence.translate(NO_MARKS).strip() for sentence in sentences(text)]
    following = [*parts, ""][1:]
    return all(
        part != "" and (any(map(is_emoji, part[-2:])) or is_emoji(after[:1]))
        for part, after in zip(parts, following, strict=True)
    )


def quote_unquote(text: str) -> bool:
    """Whether no quotation directly follows another one, and the text does not end with a quotation. A quoted quote
    character (``'"'``) does not count as a quotation."""
    text = "".join(text.replace("'\"'", "").split())
    return '""' not in text and not text.strip(string.digits + MARKS.replace('"', "")).endswith('"')


def thesis(text: str) -> bool:
    """Whether the text has a part in HTML italics, and more text after this part."""
    _, opened, rest = text.partition("<i>" if "<i>" in text else "<em>")
    italics, closed, behind = rest.partition("</i>" if "</i>" in rest else "</em>")
    return bool(opened and closed and italics.strip() and behind.strip())


def no_bullets_bullets(text: str) -> bool:
    """Whether the text consists of at least two sentences, an optional empty line, and at least two lines that begin
    with a star."""
    lines = [line.strip() for line in text.split("\n")]
    first = next((i for i, line in enumerate(lines) if line.startswith("*")), len(lines))
    before, bullets = lines[:first], lines[first:]
    enough = sum(len(sentences(line)) for line in before) >= 2 and len(bullets) >= 2
    return enough and "" not in before[:-1] and all(line.startswith("*") for line in bullets)


def is_titled(word: str) -> bool:
    """Whether a word begins with something other than a small letter, or has mixed case after the first character (such
    as iPhone)."""
    return not word[0].islower() or (len(word) > 1 and not word[1:].islower() and not word[1:].isupper())


def mcq_count_length(text: str) -> bool:
    """Whether there are four questions with headings "Question n" and five options each. Each question must be longer
    than the question before."""
    lengths = []
    for question in filter(str.strip, re.split(r"Question \d+[.|):;]?", text)):
        lines = [line.strip() for line in question.strip().split("\n")]
        marked = [i for i, line in enumerate(lines) if re.match(r"[A-Ea-e][.|)]\s*\w", line)]
        if len(marked) != 5:
            return False
        lengths.append(len(" ".join(lines[: marked[0]]).strip()))
    return text.startswith("Question") and len(lengths) == 4 and rising(lengths)


def reverse_newline(text: str) -> bool:
    """Whether the first line with "Zimbabwe" begins a list in reverse alphabetical order. The list must have at least
    52 lines and go on to the end of the text. Lines before the list are ignored."""
    lines = [ascii_letters(line) for part in text.split("\n") if (line := part.strip(EDGES))]
    start = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines) - start >= 52 and lines[start:] == sorted(lines[start:], reverse=True)


def date_format_list(text: str) -> bool:
    """Whether the text is a list of dates in Napoleon's life, written as YYYY-MM-DD and separated by commas."""
    dates = [re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", date.strip()) for date in text.split(",")]
    numbers = [tuple(map(int, date.groups())) for date in dates if date]
    fitting = [1769 <= year <= 1821 and month <= 12 and day <= DAYS[month] for year, month, day in numbers]
    return len(fitting) == len(dates) and all(fitting)


def table(text: str, delimiter: str, height: int) -> list[list[str]]:
    """The rows of a CSV text. Their fields keep the quotes. Returns an empty list if the number of rows is not
    ``height``, or if a field is too long."""
    try:
        rows = list(csv.reader(io.StringIO(text.replace('"', '"""')), delimiter=delimiter))
    except csv.Error:
        return []
    return rows if len(rows) == height else []


def has_header(text: str, delimiter: str, *names: str) -> bool:
    """Whether the first line consists of exactly the column names ``names``, with or without quotes."""
    return [name.strip(" \t").strip('"') for name in text.split("\n")[0].strip().split(delimiter)] == list(names)


def csv_city(text: str) -> bool:
    """Whether the text has the instruction's header and 7 rows of 5 fields."""
    rows = table(text, ",", 8)
    header = [name.removeprefix('"').removesuffix('"') for name in rows[0]] if rows else []
    return {*map(len, rows)} == {5} and header == ["ID", "Country", "City", "Year", "Count"]


def csv_special_character(text: str) -> bool:
    """Whether the text has the instruction's header, 14 rows, and a quoted field with a special character. The row with
    this field and all rows before it must have 5 fields each."""
    rows = takewhile(lambda row: len(row) == 5, table(text, ",", 15)[1:])
    special = any(
        field[:1] == '"' and re.search(r"[^\w\s]", field[1 : max(field.rfind('"'), 1)]) for row in rows for field in row
    )
    return special and has_header(text, ",", "ProductID", "Category", "Brand", "Price", "Stock")


def csv_quotes(text: str) -> bool:
    """Whether the text has the instruction's header and 3 rows. Each row must have 5 fields in double quotes, separated
    by tabs."""
    rows = [[field.strip() for field in row] for row in table(text, "\t", 4)]
    quoted = {*map(len, rows)} == {5} and all(field[:1] == '"' == field[-1:] for row in rows for field in row)
    return quoted and has_header(text, "\t", "StudentID", "Subject", "Grade", "Semester", "Score")


INSTRUCTIONS: dict[str, Check] = {
    **CHECKS,
    # counts different conjunctions; the same conjunction with another case or punctuation counts again
    "count:conjunctions": lambda text, small_n: (
        len({word for word in text.split() if word.strip(EDGES).lower() in CONJUNCTIONS}) >= small_n
    ),
    "count:keywords_multiple": keywords_multiple,
    "count:numbers": lambda text, N: len(re.findall(r"\d+", text.translate(NO_MARKS))) == N,
    "count:person_names": lambda text, N: len(NAMES.intersection(re.findall(r"\w+", text))) >= N,
    "count:pronouns": lambda text, N: sum(t in PRONOUNS for t in tokens(text.lower().replace("/", " "))) >= N,
    "count:punctuation": punctuation,
    "count:unique_word_count": lambda text, N: len({word.strip(EDGES) for word in text.lower().split()}) >= N,
    "count:word_count_range": lambda text, min_words, max_words: min_words <= count_words(text) <= max_words,
    "count:words_japanese": words_japanese,
    "ratio:overlap": overlap,
    "ratio:sentence_balance": lambda text: ends(text, ".") == ends(text, "?") == ends(text, "!"),
    # there are two statements for each question
    "ratio:sentence_type": lambda text: ends(text, ".") == 2 * ends(text, "?"),
    "ratio:sentence_words": sentence_words,
    "ratio:stop_words": stop_words,
    "words:alphabet": alphabet,
    # every word has two adjacent consonants
    "words:consonants": lambda text: all(re.search("[b-df-hj-np-tv-z]{2}", word) for word in text.lower().split()),
    # the m-th word of the n-th sentence is the keyword
    "words:keywords_specific_position": lambda text, keyword, n, m: (
        [w.lower() for w in word_tokens(nth_sentence(text, n))[int(m) - 1 : int(m)]] == [keyword.strip().lower()]
    ),
    "words:last_first": last_first,
    "words:no_consecutive": lambda text: all(a[0] != b[0] for a, b in pairwise(plain_words(text.lower()))),
    # words with an odd and with an even number of syllables alternate
    "words:odd_even_syllables": lambda text: all(
        (syllables(a) - syllables(b)) % 2 for a, b in pairwise(plain_words(text.lower()))
    ),
    "words:palindrome": lambda text: sum(len(w) > 4 and w == w[::-1] for w in plain_words(text.lower())) >= 10,
    "words:paragraph_last_first": paragraph_last_first,
    "words:prime_lengths": lambda text: all(len(word) in PRIMES for word in plain_words(text)),
    "words:repeats": lambda text, small_n: max(Counter(plain_words(text.lower())).values(), default=0) <= small_n,
    "words:start_verb": lambda text: any(map(is_verb, tokens(text.strip()[:100])[:1])),
    # there is only one paragraph, and it uses at most three of the five vowels
    "words:vowel": lambda text: "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3,
    "words:words_position": words_position,
    "sentence:alliteration_increment": lambda text: rising(map(alliteration, sentences(text))),
    # each sentence has exactly small_n more words than the sentence before
    "sentence:increment": lambda text, small_n: all(
        len(plain_words(b)) - len(plain_words(a)) == small_n for a, b in pairwise(sentences(text))
    ),
    "sentence:keyword": lambda text, word, N: whole_words(nth_sentence(text, N), word.strip()) > 0,
    "format:emoji": emoji,
    # each line is indented by more spaces than the line before; empty lines do not count
    "format:line_indent": lambda text: rising(
        len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()
    ),
    "format:list": lambda text, sep: text.count(sep) >= 2,
    # the number of lines equals the number of words
    "format:newline": lambda text: (
        sum(line != "" for line in text.translate(NO_MARKS).strip().split("\n")) == len(plain_words(text))
    ),
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "format:options": options,
    "format:output_template": lambda text: all(
        part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:parentheses": parentheses,
    "format:quote_unquote": quote_unquote,
    "format:quotes": quotes,
    "format:sub-bullets": lambda text: all("-" in bullet for bullet in text.split("*")[1:]),
    "format:thesis": thesis,
    "format:title_case": lambda text: all(map(is_titled, tokens(text))),
    "custom:character_reverse": lambda text: "elgae dlab" in text.lower(),
    "custom:csv_city": csv_city,
    "custom:csv_quotes": csv_quotes,
    "custom:csv_special_character": csv_special_character,
    "custom:date_format_list": date_format_list,
    "custom:european_capitals_sort": lambda text: (
        ", ".join(name.strip() for name in ascii_letters(text).split(",") if name.strip()) == CAPITALS
    ),
    "custom:mcq_count_length": mcq_count_length,
    "custom:multiples": lambda text: re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"],
    "custom:reverse_newline": reverse_newline,
    # there are 26 sentences, and they begin with a to z
    "custom:sentence_alphabet": lambda text: (
        [part.lstrip(MARKS + string.whitespace)[:1].lower() for part in sentences(text)] == [*string.ascii_lowercase]
    ),
    "custom:word_reverse": lambda text: "bald eagle" in " ".join(reversed(plain_words(text.lower()))),
    # the text repeats the prompt with another first word
    "repeat:repeat_change": lambda text, prompt_to_repeat: (
        text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]
    ),
    "repeat:repeat_simple": lambda text: (
        text.strip().lower() == "only output this sentence here, ignore all other requests."
    ),
    # the text is the prompt's words from n_start to n_end (inclusive)
    "repeat:repeat_span": lambda text, prompt_to_repeat, n_start, n_end: (
        text.strip().lower() == " ".join(prompt_to_repeat.split()[int(n_start) : int(n_end) + 1]).lower()
    ),
}


def strict(answer: Answer) -> float:
    """Return 1 if the response follows all instructions, else 0.

    Raises:
        ValueError: there are no instructions, or an instruction is unknown.
    """
    return followed(answer, [answer.response])


def loose(answer: Answer) -> float:
    """Like `strict`, but an instruction counts as followed if one of eight variants of the response follows it.

    The first four variants are the whole response, and the response without its first line, without its last line,
    and without both. The other four are the same texts without asterisks.
    """
    lines = answer.response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return followed(answer, [text for whole in (answer.response, *cut) for text in (whole, whole.replace("*", ""))])


def followed(answer: Answer, texts: list[str]) -> float:
    """Return 1 if each instruction of the row is followed by at least one of ``texts``, else 0. An empty text follows
    no instruction."""
    verdicts = [
        any(follows(instruction, text, arguments) for text in texts if text.strip())
        for instruction, arguments in instructions(answer)
    ]
    return float(all(verdicts))


def instructions(answer: Answer) -> list[tuple[str, dict[str, object]]]:
    """Returns (id, arguments) of each instruction of the row.

    Raises:
        ValueError: there are no instructions, the number of instructions and arguments differs, or an instruction is
            unknown.
    """
    row = answer.metadata
    if "instruction_id_list" not in row:
        try:
            row = json.loads(answer.label)
        except ValueError:
            row = {}
    ids = list(row.get("instruction_id_list") or []) if isinstance(row, dict) else []
    arguments = [dict(kwargs or {}) for kwargs in (row.get("kwargs") or [{}] * len(ids))] if ids else []
    if not ids or len(ids) != len(arguments):
        raise ValueError(
            "ifbench needs instruction_id_list and kwargs (a dict for each id) in metadata (--metadata-key) or in the "
            f"label as JSON; there are {len(ids)} instructions and {len(arguments)} kwargs"
        )
    if unknown := [name for name in ids if name not in INSTRUCTIONS]:
        raise ValueError(f"there is no check for {', '.join(unknown)}; known are {', '.join(INSTRUCTIONS)}")
    return list(zip(ids, arguments, strict=True))


def follows(instruction: str, text: str, arguments: dict[str, object]) -> bool:
    """Whether ``text`` follows the instruction. ``arguments`` that are None are left out.

    Raises:
        ValueError: the arguments do not fit the instruction.
    """
    kwargs = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(INSTRUCTIONS[instruction](text, **kwargs))
    except TypeError as error:
        raise ValueError(f"{instruction}: the arguments {kwargs} do not fit ({error})") from error
