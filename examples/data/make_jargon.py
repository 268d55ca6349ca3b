"""Makes jargon.jsonl from the Jargon File 4.4.7 as Debian ships it. How to run it: README.md."""

import hashlib
import json
import re
import sys

ROWS = 400
SHORTEST, LONGEST = 80, 600  # characters of a definition
# Entries that a public example should do without: coarse words, insults, drugs, violence.
UNWANTED = re.compile(
    r"fuck|shit|piss|crap|arse|\bass\b|asshole|bitch|bastard|whore|slut|sex|porn|nude|breast|penis|genital|orgasm|erotic|"
    r"masturbat|screw|bugger|damn|wank|turd|dick|cock|puke|vomit|barf|nazi|hitler|negro|nigg|jew|gay|lesbian|homosex|"
    r"queer|retard|moron|idiot|imbecile|cretin|lunatic|spaz|cripple|lame|drug|cocaine|marijuana|heroin|rape|suicid|"
    r"murder|kill|gun\b|terror|god\b|jesus|christ|religio|wimp|loser|luser|girl|female|women|woman|"
    r"bondage|sado|blood|violen|slain|slaughter|\bblack\b|urban|race\b|racis|fascis|commie|hell\b|stupid|brain.damage|drunk|beer|tits|lobotom|fart|geekasm|fubar|bigot|diddl|slave|flatul|slime|abusive|disease|bomb",
    re.IGNORECASE,
)


def entries(text):
    """(term, definition) of each entry of the glossary, in the file's order."""
    glossary = text[text.rindex("\nGlossary\n") :]
    for found in re.finditer(r"^ {3}:([^\n:]+):([^\n]*(?:\n(?!\n)[^\n]*)*)\n\n(.*?)(?=^ {3}:[^\n:]+:|^\S|\Z)", glossary, re.M | re.S):
        term, _pronunciation, body = found.groups()
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", body)]
        yield term.strip(), re.sub(r"[{}]", "", "\n\n".join(p for p in paragraphs if p))


def wanted(term, definition):
    """Short, whole, plain prose."""
    return (
        SHORTEST <= len(definition) <= LONGEST
        and definition[0] not in "([•"
        and definition[-1] in ".!?”)"
        and not re.search(r"[\[\]<>|\\_=*#~^]|--|http|www\.|\S@\S", definition)
        and not definition.startswith(("Syn", "See ", "Var", "Alt", "Common"))
        and definition.count("“") == definition.count("”")
        and not UNWANTED.search(term + " " + definition)
    )


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    kept = {term: definition for term, definition in entries(text) if wanted(term, definition)}
    # Ordered by a hash of the term: the choice is fixed, and any part of the file is a fair sample of it.
    order = sorted(kept, key=lambda term: hashlib.sha256(term.encode()).digest())
    for term in order[:ROWS]:
        row = {"prompt": f'What does "{term}" mean in hacker slang?', "completion": kept[term]}
        print(json.dumps(row, ensure_ascii=False))
    print(f"{len(kept)} entries fit, {min(ROWS, len(kept))} written", file=sys.stderr)


main()
