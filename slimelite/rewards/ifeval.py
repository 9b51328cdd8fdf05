"""IFEval's verifiable instructions (Zhou et al., arXiv:2311.07911), one check each: does a text follow it?

Written from the paper and the names of its data set's arguments; a check gets the text and the arguments of its row.
Sentences are those of `english`; the reference asks NLTK. ``change_case`` looks at case alone; the reference also asks
langdetect whether the text is English.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from slimelite.rewards.english import sentences

Check = Callable[..., bool]

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compares(count: int, number: int, relation: str) -> bool:
    """Is ``count`` in the ``relation`` ("at least" or "less than") to ``number``?

    Raises:
        ValueError: another relation.
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"a relation is 'at least' or 'less than', not {relation!r}")
    return count >= number if relation == "at least" else count < number


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return len(re.findall(r"\w+", text))


def has_word(text: str, word: str) -> bool:
    """Does ``word`` stand in the text as a word, in any case?"""
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def keyword_existence(text: str, keywords: list[str]) -> bool:
    """Every keyword occurs, in any case, perhaps inside a word."""
    return all(keyword.lower() in text.lower() for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs that often."""
    return compares(text.lower().count(keyword.lower().strip()), frequency, relation)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """None of the words occurs as a word."""
    return not any(has_word(text, word) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter, in any case, occurs that often."""
    return compares(text.lower().count(letter.lower().strip()), let_frequency, let_relation)


def response_language(text: str, language: str) -> bool:
    """The text is in the language (ISO 639-1), as langdetect sees it.

    Raises:
        ModuleNotFoundError: langdetect is not installed.
    """
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("language:response_language needs langdetect: pip install -e '.[ifbench]'") from error
    DetectorFactory.seed = 0  # it samples
    try:
        return bool(detect(text) == language)
    except LangDetectException:
        return True  # no letters to tell by; the reference lets it pass


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """That many sentences."""
    return compares(len(sentences(text)), num_sentences, relation)


def number_words(text: str, num_words: int, relation: str) -> bool:
    """That many words."""
    return compares(count_words(text), num_words, relation)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly that many paragraphs, divided by ``***``; an empty one between two dividers counts as a failure."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly that many paragraphs, divided by empty lines, and the n-th (from 1) begins with the word."""
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    given = re.match(r"['\"]*([^.,?!'\"]*)", words[0])[1] if words else ""  # type: ignore[index]  # it matches anything
    return given.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least that many placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """A postscript: P.S., P.P.S. (spaces between allowed), or another marker."""
    letters = [letter for letter in re.split(r"[.\s]+", postscript_marker.strip().lower()) if letter]
    spelled = r"\.?\s?".join(map(re.escape, letters)) if postscript_marker.strip() else r"(?!)"
    return re.search(rf"(?<!\w){spelled}", text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Exactly that many lines that begin with ``*`` or ``-``."""
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-)[^\n]*$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    """One of the three fixed answers is in it."""
    return any(choice in text.strip() for choice in CHOICES)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least that many parts in ``*stars*`` or ``**double stars**``, each within a line."""
    doubled = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"\*([^\n*]+)\*", re.sub(r"\*\*[^\n*]+\*\*", " ", text))
    return sum(bool(part.strip()) for part in doubled + single) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least that many sections, each headed by the word and a number."""
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is JSON, perhaps in a fenced block."""
    body = text.strip().removeprefix("```").removesuffix("```").removeprefix("json").removeprefix("JSON")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """A title in double angular brackets."""
    return any(found.strip("<> ") for found in re.findall(r"<<[^\n<>]+>>", text))


def two_responses(text: str) -> bool:
    """Two different responses, divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    found = [part for part in parts if part]
    return all(parts[1:-1]) and len(found) == 2 and found[0] != found[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text begins with the prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """The text ends with the phrase, quotes around it aside."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """That many words all in capitals."""
    words = re.findall(r"[\w'’-]+", text)
    return compares(sum(word.isupper() for word in words), capital_frequency, capital_relation)


def english_capital(text: str) -> bool:
    """No small letter."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """No capital letter."""
    return text.islower()


def no_comma(text: str) -> bool:
    """No comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """Double quotes around the whole."""
    text = text.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


CHECKS: dict[str, Check] = {
    "keywords:existence": keyword_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
