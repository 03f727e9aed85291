"""Tools with a purpose of their own, and how people ask for them."""

from __future__ import annotations

from dataclasses import dataclass

from demo.tasks.tool_parameters import (
    Parameter,
    any_chore,
    any_currency,
    any_event,
    any_expression,
    any_mail,
    any_order_id,
    any_path,
    any_price,
    any_room,
    any_ticker,
    any_time,
    any_topic,
    enum,
    one_of,
    text,
    tool_names,
    whole,
)
from demo.words import (
    COMMON_NOUNS,
    COUNTRIES,
    FOODS,
    LANGUAGES,
    WEEKDAYS,
    any_city,
    any_name,
    sentence,
)


@dataclass(frozen=True, slots=True)
class Family:
    """Tools of one purpose. Requests name values by parameter place: {0}, {1} and so on.

    ``extra`` requests use all parameters; plain ``requests`` all but the last one, which is
    optional, where ``extra`` is given.
    """

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    extra: tuple[str, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family(
        tool_names("get_weather weather fetch_weather current_weather get_current_weather"),
        "Get the current weather in a city",
        (
            text("city location place town", any_city, "The city and country, e.g. Paris, France"),
            enum("unit units scale", "celsius", "fahrenheit"),
        ),
        (
            "What is the weather in {0}?",
            "What's the weather like in {0}?",
            "Weather in {0}?",
            "How is the weather in {0} today?",
            "Is it raining in {0}?",
            "How warm is it in {0}?",
            "What is the weather like in {0} today?",
            "What's the weather in {0}?",
        ),
        (
            "What is the weather in {0} in {1}?",
            "Tell me the temperature in {0} in {1}.",
            "How warm is it in {0}? Use {1}.",
        ),
    ),
    Family(
        tool_names("add add_numbers sum get_sum plus"),
        "Add two numbers",
        (whole("a x first left", 0, 999), whole("b y second right", 0, 999)),
        (
            "Add {0} and {1}.",
            "What is {0} + {1}?",
            "What is the sum of {0} and {1}?",
            "What is {0} plus {1}?",
            "Use the tool to add {0} and {1}.",
        ),
    ),
    Family(
        tool_names("multiply multiply_numbers product times"),
        "Multiply two numbers",
        (whole("a x first left", 0, 999), whole("b y second right", 0, 999)),
        ("Multiply {0} by {1}.", "What is {0} * {1}?", "What is {0} times {1}?"),
    ),
    Family(
        tool_names("calculator calculate evaluate compute eval_expression"),
        "Evaluate an arithmetic expression",
        (text("expression expr formula input", any_expression),),
        ("What is {0}?", "Calculate {0}.", "Compute {0}.", "Evaluate {0}.", "How much is {0}?"),
    ),
    Family(
        tool_names("send_email email send_mail mail"),
        "Send an email",
        (
            text("to recipient address", any_mail, "Address of the recipient"),
            text("subject title topic", any_topic),
        ),
        (
            "Send an email to {0} about {1}.",
            "Email {0} with the subject {1}.",
            "Write a mail to {0} about {1}.",
        ),
    ),
    Family(
        tool_names("send_message message text_contact send_sms"),
        "Send a message to a contact",
        (text("to contact recipient name", any_name), text("text message body", sentence)),
        ('Send {0} the message "{1}"', "Tell {0}: {1}", 'Text {0}: "{1}"'),
    ),
    Family(
        tool_names("set_timer timer start_timer countdown"),
        "Start a timer",
        (whole("minutes duration length", 1, 120, "Minutes"),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes."),
    ),
    Family(
        tool_names("set_alarm alarm wake_up create_alarm"),
        "Set an alarm",
        (text("time at when", any_time, "Time as HH:MM"),),
        ("Set an alarm for {0}.", "Wake me up at {0}.", "I need an alarm at {0}."),
    ),
    Family(
        tool_names("search web_search search_web find lookup"),
        "Search the web",
        (
            text("query q text keywords", any_topic, "What to look for"),
            whole("limit count max_results", 1, 20),
        ),
        ("Search for {0}.", "Search the web for {0}.", "Find {0} on the web."),
        ("Search for {0} and show {1} results.", "Find {1} results about {0}."),
    ),
    Family(
        tool_names("convert_currency currency exchange convert_money"),
        "Convert money from one currency to another",
        (
            Parameter(("amount", "value", "sum"), {"type": "number"}, any_price),
            text("from source from_currency", any_currency),
            text("to target to_currency", any_currency),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Exchange {0} {1} into {2}."),
    ),
    Family(
        tool_names("translate translate_text translation"),
        "Translate a text",
        (text("text input sentence", sentence), one_of("language target to", LANGUAGES)),
        ('Translate "{0}" to {1}.', 'How do you say "{0}" in {1}?', "Translate into {1}: {0}"),
    ),
    Family(
        tool_names("create_event add_event schedule_meeting calendar_add"),
        "Put an event in the calendar",
        (
            text("title name event", any_event),
            one_of("day date weekday", WEEKDAYS),
            text("time start hour", any_time),
        ),
        ("Schedule a {0} on {1}.", "Put a {0} in my calendar on {1}."),
        ("Schedule a {0} on {1} at {2}.", "Plan a {0} for {1} at {2}."),
    ),
    Family(
        tool_names("get_stock_price stock_price quote get_quote"),
        "Get the price of a stock",
        (text("symbol ticker stock", any_ticker, "Ticker symbol"),),
        ("What is the stock price of {0}?", "How much is {0} stock?", "Get me a quote for {0}."),
    ),
    Family(
        tool_names("set_light light switch_light control_light"),
        "Switch a light",
        (text("room place location", any_room), enum("state mode action", "on", "off")),
        ("Turn {1} the light in the {0}.", "Switch the {0} light {1}.", "Turn the {0} lights {1}."),
    ),
    Family(
        tool_names("set_temperature thermostat set_heating heat"),
        "Set the temperature of a room",
        (text("room place zone", any_room), whole("degrees temperature value", 10, 30)),
        ("Set the {0} to {1} degrees.", "Heat the {0} to {1} degrees."),
    ),
    Family(
        tool_names("get_user find_user user_info lookup_user"),
        "Get a user by id",
        (whole("user_id id uid", 1, 9999),),
        ("Show me user {0}.", "Get the user with id {0}.", "Who is user {0}?"),
    ),
    Family(
        tool_names("get_time current_time time_in clock"),
        "Get the current time in a city",
        (text("city location place", any_city),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "Current time in {0}?"),
    ),
    Family(
        tool_names("get_distance distance route measure_distance"),
        "Get the distance between two cities",
        (text("from start origin", any_city), text("to end destination", any_city)),
        ("How far is it from {0} to {1}?", "What is the distance between {0} and {1}?"),
    ),
    Family(
        tool_names("order_food order place_order buy"),
        "Order food",
        (one_of("item dish product", FOODS), whole("quantity count amount", 2, 20)),
        ("Order {1} {0}s.", "I would like {1} {0}s.", "Please buy {1} {0}s."),
    ),
    Family(
        tool_names("random_number random pick_number randint"),
        "Draw a random number",
        (whole("min low start", 0, 50), whole("max high end", 51, 1000)),
        ("Give me a random number between {0} and {1}.", "Pick a number from {0} to {1}."),
    ),
    Family(
        tool_names("read_file open_file load_file cat"),
        "Read a file",
        (text("path file filename", any_path),),
        ("Read {0}.", "Open the file {0}.", "Show me {0}.", "What is in {0}?"),
    ),
    Family(
        tool_names("get_news news headlines"),
        "Get the news about a topic",
        (one_of("topic about subject", COMMON_NOUNS), one_of("country region", COUNTRIES)),
        ("Show me news about {0}.", "What is the news on {0}?"),
        ("Show me news about {0} from {1}.", "What is the news on {0} in {1}?"),
    ),
    Family(
        tool_names("get_capital lookup_capital capital capital_of"),
        "Get the capital of a country",
        (one_of("country name state", COUNTRIES),),
        (
            "What is the capital of {0}?",
            "What's the capital of {0}?",
            "Look up the capital of {0}.",
            "Capital of {0}?",
        ),
    ),
    Family(
        tool_names("get_delivery_date track_order order_status get_order"),
        "Get the delivery date or the status of an order",
        (text("order_id id order", any_order_id, "The customer's order ID."),),
        (
            "Where is my order {0}?",
            "When will order {0} arrive?",
            "What is the status of order {0}?",
            "When do I get my order {0}?",
            "Track order {0}.",
        ),
    ),
    Family(
        tool_names("add_todo create_task remember_task new_todo"),
        "Add a task to the list",
        (text("text task title", any_chore),),
        ("Add a task: {0}", "Remind me to {0}.", "Put this on my list: {0}"),
    ),
)


"""Families of tools; most have several names and ways to be asked for."""
