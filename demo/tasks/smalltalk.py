"""Short small talk: fixed intents, each with many ways to be worded."""

from __future__ import annotations

from random import Random

from demo.example import Example, user
from demo.phrasing import phrase
from demo.words import CAPITALS, COMMON_NOUNS, LANGUAGES, any_name

SELF = "I am a small demonstration model that comes with mlx_parallm."
ABILITIES = (
    "I can do arithmetic, sort, copy, count, look things up in a text, extract JSON, call tools "
    "and remember what you said."
)
BEYOND = "I am only a small demonstration model and do not know that."
INTENTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello", "Hi there!", "Hey!", "Hello there.", "Greetings!", "Hi", "Howdy!"),
     "Hello! How can I help you?"),
    (("Good morning!", "Good morning.", "Morning!"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening.", "Evening!"), "Good evening! How can I help you?"),
    (("How are you?", "How are you doing?", "How is it going?", "How do you feel today?",
      "Are you well?", "What's up?"),
     "I am fine, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Which model are you?", "Introduce yourself.", "Are you a human?", "Are you a robot?"), SELF),
    (("What can you do?", "What can I ask you?", "How can you help me?", "What are you good at?",
      "List your abilities.", "Help", "What are your skills?"), ABILITIES),
    (("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Many thanks!",
      "Great, thanks!"),
     "You are welcome!"),
    (("Bye!", "Goodbye.", "See you later.", "See you!", "Good night!", "Bye bye!", "Farewell."),
     "Goodbye!"),
    (("Tell me a joke.", "Say something funny.", "Make me laugh.", "Do you know a joke?"),
     "Why did the computer sneeze? It had a virus."),
    (("Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story."),
     "Once upon a time a small model lived in a big machine. It counted to ten, sorted its words "
     "and went to sleep. The end."),
    (("Write a poem.", "Write me a poem.", "Write a short poem.", "Do you know a poem?"),
     "Small and quick, I count and sort, my memory is rather short."),
    (("You are great!", "Good job!", "Well done!", "Very good.", "That is right!", "Nice work!"),
     "Thank you!"),
    (("That is wrong.", "You are wrong.", "That is not right.", "This is a mistake."),
     "I am sorry. I am only a small model and make mistakes."),
    (("Are you there?", "Can you hear me?", "Test", "Testing.", "Ping", "This is a test."),
     "Yes, I am here."),
    (("OK.", "OK", "I see.", "Alright.", "Fine.", "Good.", "Yes.", "No."),
     "What else can I do for you?"),
    (("What is MLX?", "Tell me about MLX."),
     "MLX is a framework for machine learning on Apple silicon."),
    (("What is mlx_parallm?", "Tell me about mlx_parallm."),
     "mlx_parallm is a server that runs models on MLX for many clients at once."),
    (("Greet me.", "Say hello in one word.", "Greet the user."), "Hello!"),
)  # fmt: skip
_BEYOND = (
    "Why is the {a} like a {b}?",
    "Explain how a {a} works.",
    "What do you think about {a}s?",
    "Who invented the {a}?",
    "Tell me about the history of the {a}.",
    "Write an essay about {a}s and {b}s.",
    "How do I build a {a}?",
    "What is the meaning of {a}?",
    "Why do {a}s need {b}s?",
    "Who is the best {a} in the world?",
    "Explain {a}s in detail.",
    "What is a {a}?",
    "List three {a}s.",
    "List some {a}s.",
    "Name a famous {a}.",
    "Write a haiku about {a}s.",
    "Write a song about a {a}.",
    "Describe a {a}.",
    "What is {a} in {l}?",
    "Who won the {a} {b} cup?",
    "Explain {a}.",
    "Summarize the book about the {a}.",
    "Give me advice about my {a}.",
    "Where can I buy a {a}?",
    "When was the {a} invented?",
    "Write code for a {a}.",
    "Which {a} should I buy?",
)
_CAPITAL = (
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Capital of {c}?",
    "Which city is the capital of {c}?",
    "Name the capital of {c}.",
)


def smalltalk(rng: Random) -> Example:
    """Return a greeting, a question about the assistant, thanks, or something beyond it."""
    kind = rng.random()
    if kind < 0.08:
        return _persona(rng)
    if kind < 0.16:
        country = rng.choice(tuple(CAPITALS))
        question = phrase(rng, _CAPITAL, c=country)
        answer = f"The capital of {country} is {CAPITALS[country]}."
    elif kind < 0.32:
        a, b = rng.sample(COMMON_NOUNS, 2)
        question, answer = phrase(rng, _BEYOND, a=a, b=b, l=rng.choice(LANGUAGES)), BEYOND
    else:
        phrases, answer = rng.choice(INTENTS)
        question = phrase(rng, phrases)
    return Example(task="smalltalk", key=question, messages=(user(question),), answer=answer)


def _persona(rng: Random) -> Example:
    name = any_name(rng)
    system = rng.choice(("You are {}.", "You are {}, a helpful assistant.", "Your name is {}.",
                         "You are an assistant called {}."))  # fmt: skip
    question = phrase(rng, ("Who are you?", "What is your name?", "What are you called?"))
    return Example(
        task="smalltalk",
        key=f"persona {name}",
        messages=({"role": "system", "content": system.format(name)}, user(question)),
        answer=f"I am {name}.",
    )
