"""IFEval's verifiable instructions (Zhou et al., arXiv:2311.07911), and the functions for English text that the checks
need.

A check gets the text and the arguments of its data row. The check returns whether the text follows the instruction. The
checks were written from the paper and from the names of the arguments in its data set. ``change_case`` checks only the
case, but the reference code of the paper also tests with langdetect whether the text is English.

The reference code uses NLTK (for sentences, tokens, stop words, pronouns and verbs), syllapy (for syllables) and the
emoji package. This file approximates these libraries without their data. docs/rewards.md lists the checks that may
differ for this reason. Every function takes time linear in the length of the text.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.resources import files

WORDS: dict[str, str] = tomllib.loads(files("slimelite.contrib").joinpath("english.toml").read_text("utf-8"))
STOP_WORDS, PRONOUNS, NAMES, ABBREVIATIONS, VERBS, VERB_FORMS, NO_VERBS = (
    frozenset(WORDS[name].split())
    for name in ("stop_words", "pronouns", "names", "abbreviations", "verbs", "verb_forms", "no_verbs")
)
CAPITALS = " ".join(WORDS["capitals"].split())
# closing quotes and brackets between a full stop and a space or markup
STOP = re.compile(r"""(?<=[.!?])["')\]}”’]*(?=[\s*:;])""")
TOKEN = re.compile(
    r"""\w+(?=n't\b)|n't\b|'(?:s|m|d|ll|re|ve)\b"""  # do|n't, it|'s
    r"""|\w+(?:(?:[-+*=./&@]|[,:](?=\d)|'(?!(?:s|m|d|ll|re|ve)\b))\w+)*|[^\w\s]"""  # 3.14, 1,000, well-known, and/or
)
SILENT = re.compile(r"[^aeiouylr]e$|[aeiouy][lr]e$|[^aeioutd]ed$|[^aeiouyscxzgh]es$|[^aeiou]e(?:ly|ment|less|ful)")
PARTED = re.compile(r"i[ao](?!n)|[^gq]ua|eo|[aeiouy]ing|ism$")  # runs of vowels that count as two syllables
EMOJI = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u27bf\u2934-\u2935\u2b05-\u2b55"
    "\u3030\u303d\u3297\u3299\U0001f004-\U0001faff]"
)
WORD_CHARS = 16  # number of characters before and after a full stop that decide whether it ends a sentence


def sentences(text: str) -> list[str]:
    """The text's sentences without surrounding space. Closing quotes and brackets after the full stop belong to the
    sentence.

    A line break alone does not end a sentence.
    """
    parts, start = [], 0
    for match in STOP.finditer(text):
        head = text[max(start, match.start() - WORD_CHARS) : match.start()]
        if ends_sentence(head, text[match.end() : match.end() + WORD_CHARS]):
            parts.append(text[start : match.end()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return [sentence for sentence in parts if sentence]


def ends_sentence(before: str, after: str) -> bool:
    """Whether the full stop at the end of ``before`` ends a sentence. The full stop of an abbreviation ("Dr.") or an
    initial ("J.") ends a sentence only if a capitalised stop word ("The") follows. An ellipsis before a small letter
    does not end a sentence."""
    word = (before.split() or [""])[-1].lstrip("\"'([{*_“‘")
    if word.endswith(".."):
        return not after.lstrip()[:1].islower()
    if word.rstrip(".").lower() not in ABBREVIATIONS and not re.fullmatch(r"[A-HJ-Z]\.", word):
        return True
    following = re.match(r"\W*([A-Z]\w*)", after)
    return following is not None and following[1].lower() in STOP_WORDS


def tokens(text: str) -> list[str]:
    """The words, numbers and punctuation marks of a text. "don't" becomes "do" and "n't", and "it's" becomes "it" and
    "'s"."""
    return TOKEN.findall(text)


def word_tokens(text: str) -> list[str]:
    """The tokens that have a letter or a digit."""
    return [token for token in tokens(text) if any(map(str.isalnum, token))]


def syllables(word: str) -> int:
    """The number of syllables of ``word``, which is in lower case. Each run of vowels counts as one syllable, but a
    silent e does not count. A word with a digit has 0 syllables.
    """
    if not word or re.search(r"\d", word):
        return 0
    runs = len(re.findall("[aeiouy]+", word))
    return max(runs - len(SILENT.findall(word)) + len(PARTED.findall(word)), 1)


def is_verb(word: str) -> bool:
    """Whether ``word`` is a form of a verb in english.toml. Words with the ending -ing or -ed count too, unless
    english.toml excludes them."""
    word = word.lower()
    if word in VERBS or word in VERB_FORMS:
        return True
    stem = re.fullmatch(r"(\w{2,}?)(?:e?s|ies)", word)
    if stem:
        return not VERBS.isdisjoint((stem[1], stem[1] + "e", stem[1] + "y"))
    return re.fullmatch(r"\w{2,}(?:ing|ed)", word) is not None and word not in NO_VERBS


def is_emoji(char: str) -> bool:
    """Whether ``char`` is a single character and an emoji."""
    return EMOJI.fullmatch(char) is not None


Check = Callable[..., bool]


def compares(count: int, number: int, relation: str) -> bool:
    """Whether ``count`` is "at least" or "less than" ``number``. ``relation`` is one of these two texts.

    Raises:
        ValueError: ``relation`` is neither "at least" nor "less than".
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"a relation must be 'at least' or 'less than', not {relation!r}")
    return count >= number if relation == "at least" else count < number


def occurrences(text: str, part: str) -> int:
    """The number of times that ``part`` occurs in the text, also inside words. The comparison ignores case."""
    return text.lower().count(part.lower().strip())


def count_words(text: str) -> int:
    """The number of words in ``text``. A word is a run of letters, digits and underscores."""
    return len(re.findall(r"\w+", text))


def whole_words(text: str, word: str) -> int:
    """The number of times that ``word`` occurs in the text as a whole word. The comparison ignores case."""
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def response_language(text: str, language: str) -> bool:
    """Whether langdetect detects this language (ISO 639-1) in the text.

    Raises:
        ModuleNotFoundError: langdetect is not installed.
    """
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("language:response_language needs langdetect: pip install -e '.[ifbench]'") from error
    DetectorFactory.seed = 0  # langdetect samples at random
    try:
        return bool(detect(text) == language)
    except LangDetectException:
        return True  # the text has no letters, and the reference accepts such a text


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Whether there are exactly ``num_paragraphs`` paragraphs, divided by ``***``. An empty paragraph between two
    dividers is a failure."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Whether there are exactly ``num_paragraphs`` paragraphs, divided by empty lines, and paragraph ``nth_paragraph``
    (counted from 1) begins with ``first_word``."""
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    word = re.match(r"['\"]*([^.,?!'\"]*)", words[0])[1] if words else ""  # type: ignore[index]  # always matches
    return word.lower() == first_word.lower()


def postscript(text: str, postscript_marker: str) -> bool:
    """Whether the text has a postscript that begins with ``postscript_marker``, which may be any text. In markers such
    as P.S. and P.P.S., full stops and spaces are optional."""
    letters = [letter for letter in re.split(r"[.\s]+", postscript_marker.strip().lower()) if letter]
    spelled = r"\.?\s?".join(map(re.escape, letters)) if postscript_marker.strip() else r"(?!)"
    return re.search(rf"(?<!\w){spelled}", text.lower()) is not None


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Whether at least ``num_highlights`` parts are in ``*stars*`` or ``**double stars**``. Each highlighted part must
    be within one line."""
    doubled = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"\*([^\n*]+)\*", re.sub(r"\*\*[^\n*]+\*\*", " ", text))
    return sum(bool(part.strip()) for part in doubled + single) >= num_highlights


def json_format(text: str) -> bool:
    """Whether the whole text is JSON. The JSON may be in a fenced block."""
    body = text.strip().removeprefix("```").removesuffix("```").removeprefix("json").removeprefix("JSON")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def two_responses(text: str) -> bool:
    """Whether there are two different responses, divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, keywords: all(word.lower() in text.lower() for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: compares(
        occurrences(text, keyword), frequency, relation
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(whole_words(text, w) for w in forbidden_words),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compares(
        occurrences(text, letter), let_frequency, let_relation
    ),
    "language:response_language": response_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compares(
        len(sentences(text)), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: compares(
        count_words(text), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    # placeholders are in square brackets, each within one line
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    # bullets are lines that begin with a star or a hyphen
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[ \t]*(?:\*(?!\*)|-)[^\n]*$", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: (
        re.search(r"My answer is (?:yes|no|maybe)\.", text) is not None
    ),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    # the heading of each section is the word and a number
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": json_format,
    # the title is in double angle brackets
    "detectable_format:title": lambda text: any(title.strip("<> ") for title in re.findall(r"<<[^\n<>]+>>", text)),
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compares(
        sum(word.isupper() for word in re.findall(r"[\w'’-]+", text)), capital_frequency, capital_relation
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
