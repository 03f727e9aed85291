"""Vocabulary of the generated conversations: ordinary words, and invented ones.

The invented words keep the model from memorising a closed list: what it has to copy, look up or
pass to a tool is often something it has never seen.
"""

from __future__ import annotations

from random import Random
from string import ascii_lowercase


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Liam Maria Noah Olivia Peter
    Quinn Rosa Sam Tina Umar Vera Walter Xenia Yusuf Zoe Anna Ben Clara Daniel Ella Felix Gina
    Hugo Ines Jonas Kim Laura Max Nina Oscar Paula Rahul Sofia Tom Ursula Victor Wendy Yara Adam
    Bella Chen Diego Elena Fatima George Hannah Ivan Julia Kevin Lena Marco Nora Omar Priya Ravi
    Sara Theo Uma Vince Will Yuki Amir Bianca Carlos Dora Erik Fiona Gustav Hana Igor Jane Kofi
    Lucas Mia Nadia Otto Pablo Rita Stefan Tara Viktor Mei Ada Alan Edith Leo Lily Mark Ruth
    John Mary James Linda Robert Susan Michael Sarah"""
)
CITIES = _words(
    """Paris London Rome Berlin Madrid Lisbon Vienna Prague Oslo Dublin Athens Cairo Lagos Nairobi
    Accra Tunis Dakar Delhi Mumbai Tokyo Osaka Seoul Beijing Shanghai Hanoi Bangkok Jakarta Manila
    Sydney Perth Auckland Toronto Montreal Boston Chicago Denver Seattle Austin Dallas Miami Lima
    Bogota Quito Santiago Havana Warsaw Krakow Budapest Zurich Geneva Milan Naples Porto Seville
    Hamburg Munich Cologne Lyon Nice Brussels Amsterdam Helsinki Stockholm Copenhagen Riga Tallinn
    Sofia Istanbul Ankara Dubai Doha Karachi Lahore Dhaka Colombo Kyoto Busan Taipei Atlanta
    Houston Phoenix Portland"""
)
LONG_CITIES = (
    "New York",
    "Los Angeles",
    "San Francisco",
    "San Diego",
    "Mexico City",
    "Hong Kong",
    "Rio de Janeiro",
    "Buenos Aires",
    "Cape Town",
    "New Delhi",
    "Kuala Lumpur",
    "Tel Aviv",
    "Las Vegas",
    "Saint Louis",
    "Santa Fe",
    "Abu Dhabi",
)
COUNTRIES = _words(
    """France Italy Spain Germany Portugal Austria Norway Ireland Greece Egypt Kenya Ghana India
    Japan Korea China Vietnam Thailand Australia Canada Peru Chile Poland Hungary Sweden Finland
    Denmark Turkey Brazil Mexico"""
)
ANIMALS = _words(
    """cat dog horse cow sheep goat pig duck goose hen fox wolf bear deer rabbit mouse rat owl eagle
    crow parrot swan frog snake lizard turtle fish shark whale dolphin seal crab bee ant spider
    lion tiger zebra giraffe monkey camel otter badger hamster pony donkey"""
)
FOODS = _words(
    """apple banana cherry grape lemon lime mango melon orange peach pear plum fig date kiwi papaya
    carrot onion potato tomato pepper garlic bean pea corn rice bread cheese butter milk egg honey
    soup salad pizza pasta cake cookie tea coffee juice sugar salt olive"""
)
OBJECTS = _words(
    """table chair lamp book pen pencil paper bag box bottle cup plate spoon fork knife clock watch
    phone camera radio door window key lock mirror bed pillow blanket shirt coat hat shoe sock
    glove scarf belt ring coin card ticket map bike car bus train boat plane wheel engine hammer
    nail saw rope ladder bucket broom brush soap towel candle basket drum guitar piano violin ball
    kite doll puzzle robot laptop keyboard screen printer cable battery notebook ruler eraser
    umbrella wallet suitcase tent stove kettle garden river mountain forest island bridge castle
    tower market school library museum station stone cloud star moon"""
)
COLOURS = _words(
    """red blue green yellow orange purple pink brown black white gray silver gold teal violet
    crimson turquoise beige"""
)
JOBS = _words(
    """teacher doctor nurse pilot farmer baker chef painter writer singer dancer lawyer engineer
    driver sailor tailor plumber carpenter gardener scientist librarian dentist actor judge
    mechanic architect photographer programmer"""
)
ADJECTIVES = _words(
    """old new big small tall short long wide quick slow happy sad calm loud quiet bright dark warm
    cold soft hard heavy light clean dirty sweet sour fresh dry wet round flat sharp strong weak
    rich poor brave shy kind wise lazy busy early late cheap rare plain"""
)
VERBS = _words(
    """sees finds takes likes wants keeps moves paints sells buys holds drops opens closes cleans
    breaks fixes draws hides brings carries watches follows pushes pulls lifts counts reads
    loves makes"""
)
FUNCTION_WORDS = _words(
    """the a an and or but in on at to from with by for of is was are were it this that my your his
    her our their who what when where which how not no yes all some any each every very too so if
    then now here there today tomorrow yesterday again also just only still about after before
    under over between near far up down out"""
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = _words(
    """January February March April May June July August September October November
    December"""
)
LANGUAGES = _words(
    """English French German Spanish Italian Portuguese Dutch Swedish Polish Greek Turkish Arabic
    Hindi Japanese Korean Chinese Russian Latin"""
)
COMMON_NOUNS = ANIMALS + FOODS + OBJECTS
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Portugal": "Lisbon", "Austria": "Vienna", "Norway": "Oslo", "Ireland": "Dublin",
    "Greece": "Athens", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra",
    "India": "New Delhi", "Japan": "Tokyo", "Korea": "Seoul", "China": "Beijing",
    "Vietnam": "Hanoi", "Thailand": "Bangkok", "Canada": "Ottawa", "Peru": "Lima",
    "Chile": "Santiago", "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Turkey": "Ankara", "England": "London",
}  # fmt: skip
PLAIN_WORDS = tuple(dict.fromkeys(COMMON_NOUNS + COLOURS + JOBS + ADJECTIVES + VERBS))

_ALL_WORDS = PLAIN_WORDS + FUNCTION_WORDS + NAMES + CITIES + COUNTRIES + LANGUAGES + MONTHS
_ONSETS = _words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kl pr st tr sh ch th")
_VOWELS = _words("a e i o u ai ea ou io")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "t", "x", "nd", "rk", "st")


def invented_word(rng: Random, syllables: int | None = None) -> str:
    """Return a pronounceable lower-case word that is most likely in no list."""
    count = syllables or rng.choice((1, 2, 2, 2, 3))
    parts = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count))
    return "".join(parts) + rng.choice(_CODAS)


def spliced_word(rng: Random) -> str:
    """Return the beginning of one word and the end of another, with rare letter combinations."""
    first, second = rng.choice(_ALL_WORDS), rng.choice(_ALL_WORDS)
    return first[: rng.randint(1, len(first))] + second[rng.randrange(len(second)) :].lower()


def random_letters(rng: Random) -> str:
    """Return two to nine random letters."""
    word = "".join(rng.choice(ascii_lowercase) for _ in range(rng.randint(2, 9)))
    return word.capitalize() if rng.random() < 0.3 else word


def odd_word(rng: Random) -> str:
    """Return a word that is in no list: invented, spliced or random letters."""
    return rng.choice((invented_word, spliced_word, spliced_word, random_letters))(rng)


def any_word(rng: Random) -> str:
    """Return an ordinary word, or one that is in no list in a fifth of the cases."""
    return odd_word(rng) if rng.random() < 0.2 else rng.choice(PLAIN_WORDS)


def any_name(rng: Random) -> str:
    """Return a first name, or one that is in no list in a fifth of the cases."""
    return odd_word(rng).capitalize() if rng.random() < 0.2 else rng.choice(NAMES)


def any_city(rng: Random) -> str:
    """Return a city, perhaps of two words or with its country, or an invented place."""
    kind = rng.random()
    if kind < 0.65:
        return rng.choice(CITIES)
    if kind < 0.8:
        return rng.choice(LONG_CITIES)
    if kind < 0.85:
        return f"{rng.choice(CITIES)}, {rng.choice(COUNTRIES)}"
    return odd_word(rng).capitalize()


def identifier(rng: Random) -> str:
    """Return a code such as ``A7-294`` or ``k3f9``."""
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789"
    style = rng.randrange(3)
    if style == 0:
        return f"{rng.choice(letters)}{rng.choice(digits)}-{rng.randrange(100, 1000)}"
    if style == 1:
        return "".join(rng.choice((letters + digits).lower()) for _ in range(rng.randint(4, 8)))
    return "".join(rng.choice(letters) for _ in range(3)) + str(rng.randrange(10, 10000))


def sentence(rng: Random) -> str:
    """Return a short grammatical sentence of no particular sense."""
    noun, other = rng.sample(COMMON_NOUNS, 2)
    named = rng.random() < 0.3
    subject = any_name(rng) if named else f"The {rng.choice(ADJECTIVES)} {noun}"
    ending = rng.choice(("", f" in {any_city(rng)}", " today", f" on {rng.choice(WEEKDAYS)}"))
    return f"{subject} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {other}{ending}."
