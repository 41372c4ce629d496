"""Write prompts for SmolLM2 in four categories, from packages whose licences allow it; 200 are held out.

    python examples/smollm2/prompts.py MODEL.gguf --debian FOLDER --out PROMPTS.pt

The folder holds the unpacked Debian packages that README.md names. Every word, function and passage is, by a hash of
it or of its file, either for training or held out, and no twelve words in a row of a held-out prompt occur in a
passage to train on. PROMPTS.pt has lists of token ids, "train" and "held_out"; held_out.jsonl has the texts of the
latter, and is written only where it is missing.
"""

import argparse
import ast
import gzip
import hashlib
import json
import random
import re
import sys
import sysconfig
import zlib
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from specgraph.checkpoints.tokens import read_tokenizer

COUNTS = {"chat": 18000, "code": 15000, "summary": 13500, "list": 10500}
HELD_OUT = 50
"""Held-out prompts of each category."""
KEPT = Path(__file__).parent / "held_out.jsonl"
"""The texts of the held-out prompts. Where the file is there it stays: what was measured is measured again with it."""
LONGEST = 384
"""Tokens of a prompt."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PYTHON_PACKAGES = ("numpy", "torch", "transformers", "networkx", "jinja2", "rich", "typer", "safetensors", "mkdocs")
"""Installed packages beside the standard library that functions and texts are taken from: BSD, MIT or Apache-2.0."""
CHAT = [
    "What is {concept}?", "What is the difference between {concept} and {concept2}?", "Explain {concept} to a child.",
    "Why is {concept} important?", "How does {a_thing} work?", "Can you help me to choose {a_thing}?",
    "What should I know before I buy {a_thing}?", "I am {a_person}. How can I become better at my work?",
    "Tell me a short story about {a_person} and {an_animal} in {city}.", "Write a poem about {concept}.",
    "Write a polite email to {a_person} about {a_thing}.", "What does {a_person} do all day?", "Hi! How are you today?",
    "I feel sad because of {a_thing}. What can I do?", "How do I clean {a_thing}?", "Where does {food} come from?",
    "Give me a recipe with {food} and {food2}.", "Is {food} healthy?", "How should I look after {an_animal}?",
    "What do you think about {concept}?", "What is the history of {concept}?", "What is the weather like in {city}?",
    "I am going to travel to {city} with {a_person}. What should we do there?", "What is the capital of {city}?",
    "How can I teach {concept} to {a_person}?", "What happens when {concept} meets {concept2}?",
    "Describe {a_thing} to somebody who has never seen one.", "My {animal} does not eat its {food}. What is wrong?",
    "Write a short speech about {concept} for {a_person}.", "Who invented {a_thing}?", "Define the word '{concept}'.",
    "Use the word '{concept}' in three sentences.", "How can I save money on {food}?", "How do I learn to {verb}?",
    "Write a dialogue between {a_person} and {a_person2} about {concept}.", "Is it dangerous to {verb} {a_thing}?",
    "What is the best way to {verb}?", "How long does it take to {verb} {a_thing}?", "Can {an_animal} {verb}?",
    "What are the advantages and disadvantages of {concept}?", "Should I {verb} or {verb2} {a_thing}?",
    "Write a letter to {a_person} in {city} to ask for {a_thing}.", "Give me advice about {concept} at school.",
    "What would the world be like without {concept}?", "Write a product description of {a_thing}.",
    "Invent a joke about {a_person} and {a_thing}.", "What is a good name for {an_animal}, and why?",
    "Write the first paragraph of a novel about {concept} in {city}.", "Compare {city} and {city2}.",
    "Correct the grammar: '{a_person} have went to {city} for buy {a_thing}.'", "What is {number} times {number2}?",
    "I have {number} of {a_thing} and give away {number2}. How many are left?", "Write a haiku about {an_animal}.",
    "Translate 'Where is the {thing}?' into French.", "How do you spell '{concept}', and what does it mean?",
    "Make a plan for {a_person} who wants to {verb} for a week.", "What causes {concept}?", "Thank you for your help!",
    "Explain the term '{term}' as hackers use it.", "Rewrite more formally: 'hey, can u {verb} the {thing}?'",
    "Write a review of a restaurant in {city} that serves {food}.", "Is {concept} the same as {concept2}? Why?",
]  # fmt: skip
LIST = [
    "List {few} facts about {concept}.", "Give me {few} ideas for a gift for {a_person}.",
    "List {few} uses of {a_thing}.",
    "Name {few} kinds of {food}.", "What are {few} ways to {verb}?", "List the steps to {verb} {a_thing}.",
    "Make a packing list for a trip to {city}.", "Write a shopping list for a dinner with {food} and {food2}.",
    "List {few} questions to ask {a_person} in an interview.", "Give {few} examples of {concept}.",
    "Make a table of {few} animals like {an_animal}, with what they eat.", "Give me {few} tips for {a_person}.",
    "List {few} pros and {few} cons of {concept}.", "Suggest {few} titles for a book about {concept}.",
    "List {few} words that are related to '{concept}'.", "Make a to-do list for {a_person} in {city}.",
    "What are the {few} most important parts of {a_thing}?", "List {few} things that {a_person} needs.",
    "Give {few} reasons to visit {city}.", "Make a numbered list of {few} rules about {concept}.",
    "List {few} synonyms of '{verb}', each with a sentence.", "Give me {few} business ideas with {food}.",
    "List {few} differences between {a_thing} and {a_thing2}.", "List {few} hobbies for {a_person}.",
    "Make a weekly schedule for {a_person} who wants to {verb}.", "List {few} famous people and their {concept}.",
    "What are {few} signs of {concept}?", "Give {few} exercises to learn {concept}.",
    "List {few} colours of {a_thing}.",
    "Create a checklist before you {verb} {a_thing}.", "List {few} books about {concept}, with a line about each.",
]  # fmt: skip
FUNCTION = [
    "Explain what this Python function does:\n\n```python\n{function}\n```",
    "Write a docstring for this function:\n\n```python\n{function}\n```",
    "Write unit tests for this function:\n\n```python\n{function}\n```",
    "Add type hints and comments to this code:\n\n```python\n{function}\n```",
    "Is there a bug in this code?\n\n```python\n{function}\n```",
    "Translate this function into JavaScript:\n\n```python\n{function}\n```",
    "Make this code simpler:\n\n```python\n{function}\n```",
    "{function}\n\nWhat does this return, and when does it raise an error?",
]
CODE = [
    "Write a Python function for this: {docstring}", "Write a Python function with this docstring: \"{docstring}\"",
    "Implement {algorithm} in {language}.", "Explain {algorithm} with an example in {language}.",
    "Write a Python class for {a_thing} with methods to {verb} and {verb2}.",
    "Write a {language} program that prints the names of {few} {food}s.", "Write tests for {algorithm} in {language}.",
    "Write an SQL query that finds all rows of the table {thing} where {concept} is more than {number}.",
    "Write a regular expression that finds every '{concept}' in a text, and explain it.",
    "What is the complexity of {algorithm}?", "How do I read a file of {concept} in {language}?",
    "Write a {language} function that counts how often '{concept}' occurs in a list of {thing}s.",
    "Write an HTML page about {a_thing} in {city}.", "Write a JSON document that describes {a_thing}.",
    "Write a bash script that renames all files with '{concept}' in their names.",
    "How do I sort a list of {thing}s by their {concept} in {language}?",
]  # fmt: skip
SUMMARY = [
    "Summarize this text:\n\n{passage}",
    "Summarize the following text in one sentence.\n\n{passage}",
    "{passage}\n\nWhat is this about?",
    "Give me the main points of this text:\n\n{passage}",
    "Rewrite this text in simple words:\n\n{passage}",
    "Write a title for this text, then summarize it:\n\n{passage}",
    "{passage}\n\nSummarize the text above in three bullet points.",
    "Make this text shorter:\n\n{passage}",
]
ALGORITHMS = [
    "binary search", "bubble sort", "quicksort", "merge sort", "a linked list", "a stack", "a queue", "a binary tree",
    "depth-first search", "breadth-first search", "the Fibonacci numbers", "the factorial",
    "the greatest common divisor", "a prime sieve", "Dijkstra's algorithm", "a hash table", "string reversal",
    "a palindrome test", "an anagram test", "matrix multiplication", "a word count", "a Caesar cipher", "FizzBuzz",
    "temperature conversion", "a leap year test", "the sum of a list", "the largest of three numbers",
    "removal of duplicates", "flattening of nested lists", "a calculator", "a to-do list", "a bank account",
    "a guessing game", "tic-tac-toe", "rock paper scissors", "a password generator", "a URL parser", "a CSV reader",
    "a rate limiter", "an LRU cache", "insertion sort", "selection sort", "a heap", "topological sort",
    "run-length encoding", "roman numerals", "binary to decimal", "the power function", "Pascal's triangle",
    "the n queens problem", "the knapsack problem", "edit distance", "the longest common prefix",
    "rotation of an array", "intersection of two lists", "vowel counting", "a timer", "a web server",
]  # fmt: skip
LANGUAGES = ["Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "Ruby", "TypeScript"]


Slots = dict[str, list[str]]
"""What may be put into a prompt's slots, by their names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the GGUF file, whose tokenizer is taken")
    parser.add_argument("--debian", type=Path, required=True, help="where the packages are unpacked")
    parser.add_argument("--out", type=Path, required=True, help="the file of token ids")
    arguments = parser.parse_args()
    tokenizer = read_tokenizer(arguments.target)
    everything = read(arguments.debian)
    random.seed(2)
    if not KEPT.exists():
        words, known = sources(everything, held_out=True), set[str]()
        chosen = ((name, text) for name in COUNTS for text in distinct(name, words, known, HELD_OUT, tokenizer))
        lines = (json.dumps({"category": name, "prompt": text}, ensure_ascii=False) for name, text in chosen)
        KEPT.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    held_out = [json.loads(line)["prompt"] for line in KEPT.read_text(encoding="utf-8").splitlines()]
    words, known = sources(everything, held_out=False), set(held_out)
    runs = {run for text in held_out for run in word_runs(text)}
    words["passage"][:] = [passage for passage in words["passage"] if runs.isdisjoint(word_runs(passage))]
    train = [text for name, count in COUNTS.items() for text in distinct(name, words, known, count, tokenizer)]
    parts = {
        name: [chat_ids(tokenizer, t) for t in texts] for name, texts in (("train", train), ("held_out", held_out))
    }
    torch.save(parts, arguments.out)
    print(f"{len(train)} prompts of {sum(map(len, parts['train'])) / len(train):.0f} tokens; {len(held_out)} held out")


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a user's message in the target's chat template, up to where its answer begins."""
    begin, end = "<|im_start|>", "<|im_end|>\n"
    turns = f"{begin}system\n{SYSTEM}{end}{begin}user\n{text}{end}{begin}assistant\n"
    return tokenizer.encode(turns, add_special_tokens=False).ids


def distinct(category: str, given: Slots, known: set[str], count: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield `count` prompts of a category that are not `known`, and note them there."""
    templates: dict[str, Callable[[], str]] = {
        "chat": lambda: random.choice(CHAT), "list": lambda: random.choice(LIST),
        "summary": lambda: random.choice(SUMMARY),
        "code": lambda: random.choice(FUNCTION if random.random() < 0.6 else CODE),
    }  # fmt: skip
    found = 0
    while found < count:
        text = fill(templates[category](), given)
        if text not in known and len(chat_ids(tokenizer, text)) <= LONGEST:
            known.add(text)
            found += 1
            yield text


def fill(template: str, given: Slots) -> str:
    """Put words, functions and passages into the slots of a template."""

    def choose(match: re.Match[str]) -> str:
        name = match[1].rstrip("2")
        article = re.match("an?_", name)
        word = random.choice(given[name[article.end() :] if article else name])
        return f"{'an' if word[0] in 'aeiou' else 'a'} {word}" if article else word

    return re.sub(r"\{(\w+)\}", choose, template)


def read(debian: Path) -> dict[str, list[tuple[str, str]]]:
    """Return, for each slot, pairs of what decides its part and the text."""
    slots: dict[str, list[tuple[str, str]]] = {}
    counts = (debian / "usr/share/wordnet/cntlist.rev").read_text().splitlines()
    kinds = {"thing": "106", "animal": "105", "food": "113", "person": "118", "verb": "2"}
    kinds |= {f"concept{i}": f"1{i:02}" for i in (4, 7, 9, 10, 11, 12, 14, 19, 22, 26, 27)}
    for line in counts:
        key, sense, count = line.split()
        lemma, _, code = key.partition("%")
        kind = code.replace(":", "", 1)
        for slot, begin in kinds.items():
            rare = int(count) < (1 if slot in ("animal", "food") else 3)
            if kind.startswith(begin) and sense == "1" and not rare and lemma.replace("_", "").isalpha():
                word = lemma.replace("_", " ")
                slots.setdefault(slot.rstrip("0123456789"), []).append((word, word))
    zones = (zone for zone in zoneinfo.available_timezones() if zone.count("/") == 1 and not zone.startswith("Etc"))
    slots["city"] = [(zone, zone.split("/")[1].replace("_", " ")) for zone in sorted(zones)]
    slots["number"] = [(str(number), str(number)) for number in range(2, 400)]
    slots["algorithm"] = [(name, name) for name in ALGORITHMS]
    entries = [*jargon(debian), *devil(debian)]
    slots["term"] = [(term, term) for term, _ in entries if term.isascii()]
    slots["passage"] = [(term, text) for term, text in entries if len(text) > 500]
    slots["passage"] += [*novels(debian), *state_papers(debian), *topics.items()]
    slots["function"], slots["docstring"] = [], []
    for file, text in python_files():
        for kind, found in python_parts(text):
            slots[kind].append((file, found))
    return slots


def sources(everything: dict[str, list[tuple[str, str]]], held_out: bool) -> Slots:
    """Return the part of everything that is for training, or held out: an eighth."""

    def part(key: str) -> bool:
        return (hashlib.sha256(key.encode()).digest()[0] % 8 == 0) == held_out

    slots = {name: [text for key, text in pairs if part(key)] for name, pairs in everything.items()}
    slots["passage"] = [piece for passage in slots["passage"] for piece in pieces(passage)]
    slots |= {"few": [str(number) for number in range(3, 11)], "language": LANGUAGES}
    return slots


def pieces(text: str) -> Iterator[str]:
    """Yield whole paragraphs together, 80 to 200 words each."""
    words = 0
    kept = list[str]()
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        size = len(paragraph.split())
        if size < 4:  # a word's class, a number
            continue
        if words + size > 200 or size > 200:
            if words >= 80:
                yield "\n\n".join(kept)
            kept, words = [], 0
            if size > 200:
                continue
        kept.append(paragraph)
        words += size
    if words >= 80:
        yield "\n\n".join(kept)


def word_runs(text: str) -> set[str]:
    """Return all twelve words in a row of a text."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + 12]) for i in range(len(words) - 11)}


def jargon(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield the terms of the Jargon File (public domain) and their entries."""
    with gzip.open(debian / "usr/share/dictd/jargon.dict.dz", "rt", encoding="utf-8", errors="replace") as file:
        for entry in re.split(r"\n(?=\S)", file.read()):
            term, _, text = entry.partition("\n")
            yield term.strip(), re.sub(r"[{}]", "", text)


def devil(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield the words of Bierce's Devil's Dictionary (public domain) and their entries."""
    with gzip.open(debian / "usr/share/dictd/devil.dict.dz", "rt", encoding="utf-8", errors="replace") as file:
        for entry in re.split(r"\n(?=[A-Z]{3,}[,.])", file.read()):
            yield entry.split(",")[0].split(".")[0].lower(), entry


def novels(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield chapters of Jane Austen's novels (public domain), out of the strings of R's serialised data."""
    data = (debian / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        try:
            raw = zlib.decompressobj().decompress(data[match.start() :])
        except zlib.error:
            continue
        lines, place = list[str](), 0
        while (place := raw.find(b"\x00\x04\x00\x09", place)) >= 0:
            size = int.from_bytes(raw[place + 4 : place + 8], "big")
            lines.append(raw[place + 8 : place + 8 + size].decode("utf-8", "replace"))
            place += 8 + size
        chapters = re.split(r"\n(?=CHAPTER|Chapter)", "\n".join(lines))
        yield from ((chapter[:200], chapter) for chapter in chapters[::4])  # or most passages were of novels


def state_papers(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield the Declaration of Independence and the constitution of the United States (public domain)."""
    for file in sorted((debian / "usr/share/state").glob("*.gz")):
        yield file.name, gzip.decompress(file.read_bytes()).decode("utf-8", "replace")


def python_files() -> Iterator[tuple[str, str]]:
    """Yield names and texts of Python files: of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    files = [path for path in sorted(stdlib.rglob("*.py")) if "site-packages" not in path.parts]
    for package in PYTHON_PACKAGES:
        files += sorted(Path(paths["purelib"], package).rglob("*.py"))[:400]
    for path in files:
        if {"test", "tests"} & set(path.parts):
            continue
        yield path.name, path.read_text(encoding="utf-8", errors="replace")


def python_parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield short functions of a Python file, and first sentences of docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            body = lines[node.lineno - 1 : node.end_lineno]
            indent = len(body[0]) - len(body[0].lstrip())
            if 5 <= len(body) <= 22 and all(len(line) < 100 for line in body):
                yield "function", "\n".join(line[indent:] for line in body)
            first = (ast.get_docstring(node) or "").split("\n\n")[0]
            if 30 < len(first) < 300 and ":" not in first:
                yield "docstring", " ".join(first.split())


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
