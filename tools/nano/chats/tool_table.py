"""Functions as many programs have them, with what users ask of them, what they find out, and the answers."""

import re
from collections.abc import Callable
from random import Random
from typing import Any

import attrs
import words as w
from chats import tool_values as some
from phrasing import a, capital, listed
from skills import text

Values = dict[str, Any]


@attrs.frozen
class Parameter:
    """One parameter of a known tool: the key that asks use, the names it goes by, and how values are made."""

    key: str
    names: list[str]
    make: some.Make
    schema: dict[str, Any]
    is_optional: bool


def parameter(key: str, names: str, make: some.Make | str, kind: str = "string") -> Parameter:
    """Return a parameter; a `?` behind the key makes it optional, and a text instead of a maker lists an enum."""
    schema: dict[str, Any] = {"type": kind}
    if isinstance(make, str):
        choices = make.split()
        schema["enum"], make = choices, some.one_of(choices)
    elif kind == "array":
        schema["items"] = {"type": "number"}
    return Parameter(key.rstrip("?"), names.split(), make, schema, key.endswith("?"))


@attrs.frozen(kw_only=True)
class Known:
    """A function as many programs have it.

    Attributes:
        group: functions of one group might answer the same question, so most are not listed together.
        names: what the function may be called; the first one stands for what it does.
        asks: templates; an optional parameter is given where the template has its key. A "!" begins an imperative.
        more: templates of a second question, that lean on the first.
        pairs: templates that ask for two at once; the second value's key ends in 2.
        missing: questions in which a required value is missing, and what to ask back.
        facts: makes what the function finds out.
        shapes: results, with `{key}` for the facts.
        answers: templates over arguments and facts.
        is_paired: the names of all parameters are chosen together.
    """

    group: str
    names: str
    says: str
    parameters: list[Parameter]
    asks: str
    facts: Callable[[Random, Values], Values]
    shapes: list[Any]
    answers: str
    more: str = ""
    pairs: str = ""
    missing: str = ""
    is_paired: bool = False

    @property
    def does(self) -> str:
        """The name that stands for what the function does."""
        return self.names.split()[0]


def _exact(value: float) -> int | float:
    value = round(value, 4)
    return int(value) if value == int(value) else value


def _sum(sign: Callable[[Any, Any], Any]) -> Callable[[Random, Values], Values]:
    return lambda rng, v: {"r": _exact(sign(v["a"], v["b"]))}


_RESULTS: list[Any] = ["{r}", "{r}", {"result": "{r}"}, {"result": "{r}"}, {"value": "{r}"}, {"answer": "{r}"}, {"output": "{r}"}]  # fmt: skip
DONE: list[Any] = ["ok", "done", "OK", {"status": "ok"}, {"success": True}, {"ok": True}, {"status": "done"}, {"status": "success"}, {"result": "ok"}, "Success", {"done": True}]  # fmt: skip
_AB = "a b|x y|first second|num1 num2|left right|n m"
_A, _B = (" ".join(pair.split()[at] for pair in _AB.split("|")) for at in (0, 1))


def nothing(rng: Random, v: Values) -> Values:
    return {}


def _weather(rng: Random, v: Values) -> Values:
    top = 100 if v.get("unit") == "fahrenheit" else 38
    return {
        "T": rng.randint(-9, top),
        "C": rng.choice(some.CONDITIONS),
        "H": rng.randint(20, 99),
        "W": rng.randint(1, 60),
    }


# fmt: off
KNOWN = [
    Known(group="weather", names="get_weather get_weather weather get_current_weather weather_lookup getWeather current_weather fetch_weather weather_in",
          says="Get the weather of a city.;Get the current weather.;Current weather in a given location.;Return the weather for a place.;Look up the weather.;Get the current weather for a city.;Tell the weather.",
          parameters=[parameter("city", "city city location place town location", some.city), parameter("unit?", "unit units unit", "celsius fahrenheit")],
          asks="what is the weather in {city};what's the weather like in {city};how is the weather in {city};weather in {city};how warm is it in {city};is it raining in {city};!tell me the weather in {city};what is the weather in {city} today;how cold is it in {city};what is the weather in {city} in {unit};what's the weather in {city} in {unit};!give me the weather of {city};!give me the weather of {city} in {unit};is it sunny in {city};do i need an umbrella in {city};what is the temperature in {city};how hot is it in {city};is it warm in {city};is it windy in {city} now;is there snow in {city}",
          more="and in {city};what about {city};and {city};how about {city};and what is the weather in {city}",
          pairs="what is the weather in {city} and {city2};how is the weather in {city} and in {city2};weather in {city} and {city2};!compare the weather in {city} and {city2};what's the weather like in {city} and {city2};what is the weather in {city} and in {city2}",
          missing="what is the weather;what's the weather like;how is the weather today>Which city do you mean?;Of which city would you like to know the weather?",
          facts=_weather,
          shapes=[{"temperature": "{T}", "condition": "{C}"}, {"city": "{city}", "temperature": "{T}", "conditions": "{C}"}, {"temp": "{T}", "weather": "{C}"}, {"location": "{city}", "temp_c": "{T}", "sky": "{C}"}, {"temperature": "{T}"},
                  {"condition": "{C}", "temperature": "{T}", "humidity": "{H}"}, {"weather": "{C}"}, {"forecast": "{C}", "degrees": "{T}"}, "{C}", "{C}, {T} degrees", "{T} degrees, {C}", {"temperature": "{T}", "condition": "{C}", "wind": "{W}"}, {"temperature": "{T}", "summary": "{C}"},
                  {"current": {"temp": "{T}", "text": "{C}"}}, "{C} and {T} degrees in {city}"],
          answers="It is {T} degrees and {C} in {city}.;It is {T} degrees and {C} in {city}.;The weather in {city} is {C}, with {T} degrees.;It is {C} in {city}.;The weather in {city} is {C}.;It is {T} degrees in {city}.;The temperature in {city} is {T} degrees.;It is {T} degrees {unit} and {C} in {city}.;It is {T} degrees {unit} in {city}."),
    Known(group="weather", names="get_forecast forecast weather_forecast getForecast", says="Get the weather forecast.;Forecast for the next days.;Weather forecast of a city for some days.",
          parameters=[parameter("city", "city location place", some.city), parameter("days", "days num_days days", lambda rng: rng.randint(2, 10), "integer")],
          asks="what is the forecast for {city} for {days} days;!give me a {days} day forecast for {city};how will the weather be in {city} in the next {days} days;{days} day forecast for {city}",
          facts=_weather, shapes=[{"forecast": "{C}"}, {"summary": "{C}", "high": "{T}"}, "{C}", {"outlook": "{C}", "max": "{T}"}],
          answers="The forecast for {city} is {C}.;The forecast for {city} is {C}, with up to {T} degrees."),
    Known(group="math", names="add add_numbers add plus sum_two addNumbers", says="Add two numbers.;Returns the sum of two numbers.;The sum of two numbers.;Adds a and b.;Add numbers.", is_paired=True,
          parameters=[parameter("a", _A, some.number, "number"), parameter("b", _B, some.number, "number")],
          asks="what is {a} plus {b};what is {a} + {b};!add {a} and {b};!add {a} to {b};{a} + {b};{a} plus {b};what is the sum of {a} and {b};how much is {a} plus {b};!calculate {a} + {b};{a}+{b};what's {a} plus {b}",
          more="and {a} plus {b};now {a} plus {b};and what is {a} + {b}", pairs="what is {a} plus {b} and {a2} plus {b2};!add {a} and {b}, and also {a2} and {b2};what is {a} + {b}, and what is {a2} + {b2};{a} + {b} and {a2} + {b2}",
          missing="!add two numbers;!add some numbers>Which numbers should I add?;Which two numbers do you mean?",
          facts=_sum(lambda x, y: x + y), shapes=[*_RESULTS, {"sum": "{r}"}], answers="{a} plus {b} is {r}.;{a} plus {b} is {r}.;The sum of {a} and {b} is {r}.;The sum is {r}."),
    Known(group="math", names="subtract minus difference subtract_numbers", says="Subtract two numbers.;Subtracts the second number from the first.;The difference of two numbers.", is_paired=True,
          parameters=[parameter("a", _A, some.number, "number"), parameter("b", _B, some.number, "number")],
          asks="what is {a} minus {b};what is {a} - {b};{a} - {b};how much is {a} minus {b};{a} minus {b};!calculate {a} - {b};what is the difference of {a} and {b}",
          more="and {a} minus {b};now {a} - {b}", pairs="what is {a} minus {b} and {a2} minus {b2};{a} - {b} and {a2} - {b2}", missing="!subtract two numbers>Which numbers do you mean?",
          facts=_sum(lambda x, y: x - y), shapes=[*_RESULTS, {"difference": "{r}"}], answers="{a} minus {b} is {r}.;The difference is {r}."),
    Known(group="math", names="multiply multiply times product multiply_numbers", says="Multiply two numbers.;Returns the product of two numbers.;The product of a and b.", is_paired=True,
          parameters=[parameter("a", _A, lambda rng: rng.randint(0, rng.choice([12, 99, 999])), "number"), parameter("b", _B, lambda rng: rng.randint(0, rng.choice([12, 99, 999])), "number")],
          asks="what is {a} times {b};what is {a} * {b};!multiply {a} by {b};!multiply {a} and {b};{a} * {b};{a} x {b};how much is {a} times {b};what is the product of {a} and {b};what's {a} times {b};!calculate {a} * {b}",
          more="and {a} times {b};now {a} * {b}", pairs="what is {a} times {b} and {a2} times {b2};!multiply {a} by {b}, and {a2} by {b2}", missing="!multiply two numbers>Which numbers should I multiply?",
          facts=_sum(lambda x, y: x * y), shapes=[*_RESULTS, {"product": "{r}"}], answers="{a} times {b} is {r}.;{a} times {b} is {r}.;The product is {r}."),
    Known(group="math", names="divide divide_numbers quotient", says="Divide two numbers.;Divides the first number by the second.", is_paired=True,
          parameters=[parameter("a", _A, some.number, "number"), parameter("b", _B, lambda rng: rng.randint(1, rng.choice([12, 99])), "number")],
          asks="what is {a} divided by {b};!divide {a} by {b};{a} / {b};what is {a} / {b};how much is {a} divided by {b}",
          facts=_sum(lambda x, y: x / y), shapes=[*_RESULTS, {"quotient": "{r}"}], answers="{a} divided by {b} is {r}."),
    Known(group="math", names="sum_numbers sum add_all total", says="Add up a list of numbers.;The sum of many numbers.;Sums numbers.", parameters=[parameter("numbers", "numbers values items", some.numbers, "array")],
          asks="what is the sum of {numbers};!add up {numbers};!sum {numbers};!add the numbers {numbers};what is the total of {numbers}",
          facts=lambda rng, v: {"r": sum(v["numbers"])}, shapes=[*_RESULTS, {"sum": "{r}"}, {"total": "{r}"}], answers="The sum is {r}.;The total is {r}.;The sum of {numbers} is {r}."),
    Known(group="math", names="calculator calculate calculator eval_expression compute evaluate", says="Calculate an expression.;Evaluate a mathematical expression.;A calculator.;Useful for arithmetic.;Compute the value of an expression.",
          parameters=[parameter("e", "expression expression expr formula input", some.expression)],
          asks="what is {e};!calculate {e};{e};!compute {e};how much is {e};!work out {e};!use the calculator for {e};!evaluate {e}", more="and {e};now {e};and what is {e}", pairs="what is {e} and what is {e2};!calculate {e} and {e2};{e} and {e2}",
          missing="!calculate something for me;can you calculate something>What should I calculate?",
          facts=lambda rng, v: {"r": _value_of(v["e"])}, shapes=_RESULTS, answers="{e} is {r}.;{e} = {r}.;The result of {e} is {r}.;The result is {r}."),
    Known(group="math", names="square_root sqrt get_square_root", says="The square root of a number.;Compute a square root.", parameters=[parameter("x", "x number value n", lambda rng: rng.choice([rng.randint(1, 40) ** 2, some.number(rng)]), "number")],
          asks="what is the square root of {x};!calculate the square root of {x};square root of {x}", facts=lambda rng, v: {"r": _exact(v["x"] ** 0.5)}, shapes=_RESULTS, answers="The square root of {x} is {r}."),
    Known(group="time", names="get_time current_time get_current_time time_in getTime clock", says="Get the current time.;Current time in a time zone.;Returns the time.;Tell the time in a place.", parameters=[parameter("zone", "timezone tz timezone zone", some.one_of(some.ZONES))],
          asks="what time is it in {zone};what is the time in {zone};!tell me the time in {zone};current time in {zone};what's the time in {zone}", more="and in {zone};what about {zone}", pairs="what time is it in {zone} and in {zone2}", missing="what time is it;what's the time>In which time zone?",
          facts=lambda rng, v: {"t": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"}, shapes=["{t}", {"time": "{t}"}, {"time": "{t}", "timezone": "{zone}"}, {"now": "{t}"}, {"current_time": "{t}"}, {"datetime": "2026-03-14 {t}"}], answers="It is {t} in {zone}.;The time in {zone} is {t}."),
    Known(group="time", names="get_time current_time get_local_time time_in_city city_time", says="Get the time in a city.;The local time of a city.;Current local time.", parameters=[parameter("city", "city location place", some.city)],
          asks="what time is it in {city};what is the time in {city};!tell me the time in {city};what's the time in {city};how late is it in {city}", more="and in {city};what about {city}", pairs="what time is it in {city} and {city2};what time is it in {city} and in {city2}", missing="what time is it;what's the time>In which city?",
          facts=lambda rng, v: {"t": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"}, shapes=["{t}", {"time": "{t}"}, {"time": "{t}", "city": "{city}"}, {"local_time": "{t}"}, {"current_time": "{t}"}], answers="It is {t} in {city}.;The time in {city} is {t}."),
    Known(group="date", names="get_date current_date today get_current_date", says="Get today's date.;The current date.;Returns the date of today.", parameters=[],
          asks="what is the date;what is today's date;which day is it today;!tell me the date;what date is it", facts=lambda rng, v: {"d": f"202{rng.randint(3, 9)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"}, shapes=["{d}", {"date": "{d}"}, {"today": "{d}"}], answers="Today is {d}.;The date is {d}."),
    Known(group="search", names="search web_search search_web google_search internet_search searchWeb lookup", says="Search the web.;Search the internet.;Web search.;Find pages on the web.;Search for information.", parameters=[parameter("q", "query query q search_term text", some.topic)],
          asks="!search for {q};!search the web for {q};!look up {q};!find something about {q};!search {q};!google {q};what can you find about {q};!find information about {q};what is the news about {q}", more="now search for {q};and {q}", pairs="!search for {q} and for {q2}", missing="!search the web;!search something for me;can you search the web for me>What should I search for?",
          facts=lambda rng, v: {"T": some.headline(rng), "n": rng.randint(2, 900)}, shapes=[{"results": ["{T}"]}, "{T}", [{"title": "{T}"}], {"title": "{T}"}, {"results": [{"title": "{T}", "url": "https://example.com/{n}"}]}, {"count": "{n}", "top": "{T}"}, {"snippet": "{T}"}], answers='I found this: {T};I found this about {q}: {T};Here is what I found: {T}'),
    Known(group="email", names="send_email email send_mail sendEmail mail", says="Send an email.;Send an e-mail to a person.;Sends mail.", parameters=[parameter("to", "to recipient to address", some.email), parameter("s", "subject subject title", some.one_of(some.SUBJECTS)), parameter("b", "body body text message content", some.body)],
          asks="!send an email to {to} with subject '{s}' and body '{b}';!email {to} with the subject \"{s}\" and the text \"{b}\";!write an email to {to}, subject {s}, saying \"{b}\";!send {to} an email with the subject {s} and the text '{b}';!mail {to}: subject \"{s}\", body \"{b}\"",
          missing="!send an email to {to};!write an email to {to}>What should the subject and the text be?;What should I write?",
          facts=lambda rng, v: {"i": some.code(rng)}, shapes=[*DONE, {"status": "sent"}, {"sent": True}, "sent", {"status": "sent", "id": "{i}"}, "Email sent."], answers="I have sent the email to {to}.;The email to {to} is sent."),
    Known(group="message", names="send_message send_sms text_message sendMessage message_user", says="Send a message to a person.;Send a text message.;Sends a short message.", parameters=[parameter("to", "to recipient name contact", some.name), parameter("b", "text message body content", some.body)],
          asks="!send {to} the message \"{b}\";!text {to} '{b}';!tell {to}: \"{b}\";!send a message to {to} saying \"{b}\";!write {to} \"{b}\";!message {to} '{b}'", missing="!send a message to {to};!text {to}>What should I write?;What should the message say?",
          facts=nothing, shapes=[*DONE, {"status": "sent"}, {"delivered": True}, "sent"], answers="I have sent the message to {to}.;Your message to {to} is sent."),
    Known(group="currency", names="convert_currency currency_converter exchange convertCurrency convert_money", says="Convert money between currencies.;Convert an amount to another currency.;Currency conversion.", is_paired=True,
          parameters=[parameter("n", "amount amount value amount", some.amount, "number"), parameter("f", "from_currency from source base", some.one_of(some.CURRENCIES)), parameter("t", "to_currency to target quote", some.one_of(some.CURRENCIES))],
          asks="!convert {n} {f} to {t};how much is {n} {f} in {t};what is {n} {f} in {t};!change {n} {f} into {t};{n} {f} to {t};{n} {f} in {t}", more="and {n} {f} in {t}", pairs="!convert {n} {f} to {t} and {n2} {f2} to {t2}",
          facts=lambda rng, v: {"r": round(v["n"] * rng.uniform(0.5, 2), 2)}, shapes=[*_RESULTS, {"converted": "{r}"}, {"amount": "{r}", "currency": "{t}"}], answers="{n} {f} is {r} {t}.;{n} {f} are {r} {t}."),
    Known(group="stock", names="get_stock_price stock_price get_quote getStockPrice share_price", says="Get the price of a stock.;Current price of a share.;Stock price by its symbol.", parameters=[parameter("s", "symbol ticker symbol stock", some.one_of(some.SYMBOLS))],
          asks="what is the stock price of {s};how much is {s};what is the price of {s};!get the price of {s} stock;stock price of {s};what does a share of {s} cost;how is {s} doing", more="and {s};what about {s}", pairs="what are the stock prices of {s} and {s2};!compare the prices of {s} and {s2}", missing="what is the stock price;!get a stock price>Of which stock?;Which stock do you mean?",
          facts=lambda rng, v: {"r": some.price(rng)}, shapes=["{r}", {"price": "{r}"}, {"symbol": "{s}", "price": "{r}"}, {"price": "{r}", "currency": "USD"}, {"last": "{r}"}, {"quote": "{r}"}], answers="The price of {s} is {r}.;{s} is at {r}.;The stock price of {s} is {r}."),
    Known(group="timer", names="set_timer start_timer timer setTimer create_timer", says="Set a timer.;Start a timer for some minutes.;Starts a timer.", parameters=[parameter("m", "minutes duration minutes length", some.small, "integer"), parameter("l?", "label name label", some.one_of(["tea", "pasta", "eggs", "bread", "break", "nap", "pizza", "laundry"]))],
          asks="!set a timer for {m} minutes;!start a timer of {m} minutes;{m} minute timer;!set a {m} minute timer;!remind me in {m} minutes;!set a timer for {m} minutes called {l};!start a {l} timer for {m} minutes;timer {m} minutes", missing="!set a timer;!start a timer>For how many minutes?;How many minutes should it run?",
          facts=nothing, shapes=[*DONE, {"timer": "set"}, "Timer started", {"status": "started"}], answers="The timer is set for {m} minutes.;I have set a timer for {m} minutes.;The {l} timer is set for {m} minutes."),
    Known(group="alarm", names="set_alarm alarm create_alarm setAlarm wake_up", says="Set an alarm.;Wake the user at a time.;Sets an alarm.", parameters=[parameter("t", "time at time hour", some.time)],
          asks="!set an alarm for {t};!wake me at {t};!set an alarm at {t};alarm at {t};!wake me up at {t}", missing="!set an alarm;!wake me up>At what time?;For what time?", facts=nothing, shapes=[*DONE, {"alarm": "{t}"}, {"status": "set"}], answers="The alarm is set for {t}.;I have set an alarm for {t}."),
    Known(group="music", names="play_music play_song play playSong start_music", says="Play a song.;Play music.;Plays a song by its title.", parameters=[parameter("s", "song title song track name", some.song)],
          asks="!play {s};!play the song {s};!play \"{s}\";!put on {s};i want to hear {s};!start the song '{s}';let me hear {s}", more="now play {s}", missing="!play a song;!play music;!play something>Which song would you like to hear?;Which song should I play?", facts=nothing, shapes=[*DONE, {"playing": "{s}"}, {"status": "playing"}, "Now playing {s}"], answers="Now playing {s}.;I am playing {s}."),
    Known(group="translate", names="translate translate_text translator translateText", says="Translate a text.;Translate text into another language.;Translates text.", parameters=[parameter("x", "text text sentence phrase input", some.body), parameter("l", "language target_language to lang target", some.one_of(some.LANGUAGES))],
          asks="!translate \"{x}\" to {l};!translate '{x}' into {l};what is \"{x}\" in {l};how do you say '{x}' in {l};!say \"{x}\" in {l};!translate \"{x}\" into {l}", missing="!translate \"{x}\";!translate '{x}' for me>Into which language?",
          facts=lambda rng, v: {"r": " ".join(text.made_up_word(rng) for _ in range(rng.randint(1, 4)))}, shapes=["{r}", {"translation": "{r}"}, {"text": "{r}", "language": "{l}"}, {"translated_text": "{r}"}, {"result": "{r}"}, {"output": "{r}"}], answers="In {l} it is \"{r}\".;\"{x}\" in {l} is \"{r}\"."),
    Known(group="user", names="lookup_user get_user find_user getUser search_user user_info", says="Look up a user by name.;Get what is known about a user.;Find a user.", parameters=[parameter("n", "name username user name", some.name)],
          asks="who is {n};!look up {n};!find the user {n};what do you know about {n};!get the user {n};!show me {n}", more="and {n};what about {n}", pairs="!look up {n} and {n2};who are {n} and {n2}", missing="!look up a user;!find a user>Which user do you mean?;What is the user's name?",
          facts=lambda rng, v: {"e": some.email(rng), "g": rng.randint(18, 90), "j": (job := rng.choice(w.JOBS)), "aj": a(job), "c": some.city(rng)}, shapes=[{"name": "{n}", "email": "{e}"}, {"name": "{n}", "age": "{g}"}, {"name": "{n}", "age": "{g}", "city": "{c}"}, {"job": "{j}", "city": "{c}"}, {"email": "{e}", "age": "{g}"}, {"name": "{n}", "job": "{j}"}, "{n}, {g}, {c}"],
          answers="The email of {n} is {e}.;{n} is {g} years old.;{n} is {g} years old and lives in {c}.;{n} works as {aj} in {c}.;{n} is {g} years old, and the email is {e}.;{n} works as {aj}."),
    Known(group="event", names="create_event add_event schedule_meeting createEvent new_event schedule", says="Create an event.;Add an event to the calendar.;Put something into the calendar.", parameters=[parameter("t", "title name title event", some.one_of(some.EVENTS)), parameter("d", "date day date when", some.date), parameter("h?", "time start time", some.time)],
          asks="!create an event called {t} on {d};!add {t} to my calendar on {d};!schedule {t} for {d};!create the event \"{t}\" for {d} at {h};!put {t} on {d} into the calendar;!schedule {t} on {d} at {h};!plan {t} for {d}", missing="!create an event called {t};!add {t} to my calendar>On which day?;For which date?",
          facts=lambda rng, v: {"i": some.code(rng)}, shapes=[*DONE, {"id": "{i}"}, {"event_id": "{i}", "status": "created"}, {"created": True}, "Event created"], answers="I have added {t} on {d}.;{t} is in your calendar on {d}.;{t} is planned for {d} at {h}."),
    Known(group="random", names="roll_dice roll_die roll dice rollDice", says="Roll a die.;Roll a die with some sides.;Rolls dice.", parameters=[parameter("s", "sides num_sides faces sides", some.one_of([4, 6, 8, 10, 12, 20, 100]), "integer")],
          asks="!roll a die with {s} sides;!roll a {s} sided die;!roll a d{s};!throw a die with {s} sides;!roll a {s}-sided dice", facts=lambda rng, v: {"r": rng.randint(1, v["s"])}, shapes=[*_RESULTS, {"roll": "{r}"}, {"rolled": "{r}"}], answers="You rolled a {r}.;The die shows {r}."),
    Known(group="random", names="random_number get_random_number random_int random randomNumber", says="A random number.;Draw a random number between two bounds.;Generates a random integer.", is_paired=True, parameters=[parameter("a", "min low start minimum", lambda rng: rng.randint(0, 20), "integer"), parameter("b", "max high end maximum", lambda rng: rng.choice([50, 100, 1000, rng.randint(30, 500)]), "integer")],
          asks="!give me a random number between {a} and {b};!pick a number from {a} to {b};random number between {a} and {b};!choose a random number from {a} to {b};!draw a number between {a} and {b}", missing="!give me a random number;!pick a number>Between which numbers?",
          facts=lambda rng, v: {"r": rng.randint(v["a"], v["b"])}, shapes=[*_RESULTS, {"number": "{r}"}], answers="The number is {r}.;The random number is {r}."),
    Known(group="random", names="flip_coin coin_flip toss_coin flipCoin", says="Flip a coin.;Toss a coin.;Heads or tails.", parameters=[], asks="!flip a coin;!toss a coin;heads or tails;!throw a coin", facts=lambda rng, v: {"r": rng.choice(["heads", "tails"])}, shapes=[*_RESULTS, {"side": "{r}"}], answers="It is {r}.;The coin shows {r}."),
    Known(group="capital", names="get_capital capital_of capital lookup_capital getCapital", says="The capital of a country.;Get the capital city of a country.;Look up a capital.", parameters=[parameter("c", "country country nation name", lambda rng: rng.choice(some.COUNTRIES) if rng.random() < 0.7 else capital(text.made_up_word(rng)))],
          asks="what is the capital of {c};capital of {c};which city is the capital of {c};!tell me the capital of {c}", more="and of {c};what about {c}", pairs="what are the capitals of {c} and {c2}", facts=lambda rng, v: {"r": w.CAPITALS.get(v["c"]) or some.city(rng)}, shapes=["{r}", {"capital": "{r}"}, {"country": "{c}", "capital": "{r}"}, {"city": "{r}"}, {"result": "{r}"}], answers="The capital of {c} is {r}."),
    Known(group="light", names="turn_on_light light_on switch_on_light turnOnLight lights_on", says="Turn on the light in a room.;Switch a light on.;Turns on a lamp.", parameters=[parameter("r", "room location room area", some.one_of(some.ROOMS))],
          asks="!turn on the light in the {r};!switch on the {r} light;!turn the {r} light on;light on in the {r};!put the light on in the {r}", more="and in the {r};now the {r}", pairs="!turn on the light in the {r} and the {r2}", missing="!turn on the light;!switch on the light>In which room?;Which room do you mean?", facts=nothing, shapes=[*DONE, {"light": "on"}, {"state": "on"}, "on"], answers="The light in the {r} is on.;The {r} light is on."),
    Known(group="light", names="set_light control_light light switch_light setLight", says="Switch a light on or off.;Control the light in a room.;Set a light.", parameters=[parameter("r", "room location area", some.one_of(some.ROOMS)), parameter("s", "state action mode", "on off")],
          asks="!turn the {r} light {s};!turn {s} the light in the {r};!switch the light in the {r} {s};{r} light {s};!switch {s} the {r} light", pairs="!turn the {r} light {s} and the {r2} light {s2}", facts=nothing, shapes=[*DONE, {"state": "{s}"}, {"light": "{s}"}], answers="The light in the {r} is {s}.;The {r} light is {s}."),
    Known(group="heat", names="set_temperature set_thermostat heat_room thermostat", says="Set the temperature of a room.;Set the thermostat.;Heat or cool a room.", parameters=[parameter("r", "room zone room", some.one_of(some.ROOMS)), parameter("t", "temperature degrees temp", lambda rng: rng.randint(15, 26), "number")],
          asks="!set the {r} to {t} degrees;!heat the {r} to {t} degrees;!set the temperature in the {r} to {t};i want {t} degrees in the {r}", missing="!set the temperature in the {r};!heat the {r}>To how many degrees?", facts=nothing, shapes=[*DONE, {"target": "{t}"}, {"set": "{t}"}], answers="The {r} is set to {t} degrees."),
    Known(group="door", names="lock_door lockDoor lock close_door", says="Lock a door.;Locks one of the doors.", parameters=[parameter("d", "door name door_id", "front back garage cellar")],
          asks="!lock the {d} door;!close the {d} door;is the {d} door locked? if not, lock it;!lock the door at the {d}", facts=nothing, shapes=[*DONE, {"locked": True}, {"state": "locked"}, "locked"], answers="The {d} door is locked."),
    Known(group="area", names="calculate_area area get_area rectangle_area calculateArea", says="The area of a rectangle.;Calculate the area of a rectangle.;Area from width and height.", is_paired=True, parameters=[parameter("a", "width w width length", some.size, "number"), parameter("b", "height h length width", some.size, "number")],
          asks="what is the area of a rectangle of {a} by {b};!calculate the area of a {a} by {b} rectangle;how big is a room of {a} by {b};what is the area of a field with sides {a} and {b};area of {a} x {b}", missing="!calculate the area of a rectangle>What are its sides?;How long are its sides?", facts=_sum(lambda x, y: x * y), shapes=[*_RESULTS, {"area": "{r}"}], answers="The area is {r}.;The area of {a} by {b} is {r}."),
    Known(group="pizza", names="order_pizza pizza_order orderPizza buy_pizza", says="Order a pizza.;Orders a pizza with a topping.", parameters=[parameter("s", "size size pizza_size", "small medium large"), parameter("t", "topping topping toppings extra", some.one_of(some.TOPPINGS))],
          asks="!order a {s} pizza with {t};i want a {s} pizza with {t};i would like a {s} pizza with {t};a {s} {t} pizza please;!get me a {s} {t} pizza;one {s} pizza with {t}", missing="!order a pizza with {t};i want a pizza with {t}>Which size would you like: small, medium or large?;Small, medium or large?",
          facts=lambda rng, v: {"i": rng.randint(10, 60), "n": rng.randint(1, 999)}, shapes=[*DONE, {"order_id": "{n}", "minutes": "{i}"}, {"eta": "{i}"}, {"minutes": "{i}"}, {"order": "{n}"}], answers="Your {s} pizza with {t} is ordered.;Your {s} pizza with {t} comes in {i} minutes.;Your {s} pizza with {t} is ordered, with the number {n}."),
    Known(group="news", names="get_news news latest_news headlines getNews", says="Get the news about a topic.;Latest headlines.;News on a topic.", parameters=[parameter("t", "topic category subject", some.one_of(["sports", "science", "politics", "music", "football", "technology", "health", "travel", "film", "art"]))],
          asks="what is the news about {t};what's new in {t};!show me the {t} news;{t} news;!give me the latest news about {t}", missing="what is the news;!show me the news>About which topic?", facts=lambda rng, v: {"T": some.headline(rng)}, shapes=["{T}", {"headline": "{T}"}, {"news": ["{T}"]}, [{"title": "{T}"}], {"title": "{T}"}], answers="The news about {t}: {T};Here is the news about {t}: {T}"),
    Known(group="todo", names="add_todo create_task add_task addTodo todo", says="Add a task to the list.;Create a task.;Put a task on the to-do list.", parameters=[parameter("t", "task title item text", some.one_of(some.TASKS)), parameter("p?", "priority priority level", "low medium high")],
          asks="!add {t} to my list;!remind me to {t};!add the task \"{t}\";!put {t} on my to-do list;!create a task: {t};!add {t} to my list with {p} priority;!create the task '{t}' with priority {p}", pairs="!add {t} and {t2} to my list;!remind me to {t} and to {t2}", missing="!add a task;!add something to my list>What should I add?", facts=lambda rng, v: {"i": rng.randint(1, 99)}, shapes=[*DONE, {"id": "{i}"}, {"task": "{t}", "done": False}, {"added": True}], answers="I have added {t} to your list.;\"{t}\" is on your list."),
    Known(group="distance", names="get_distance distance distance_between calculate_distance getDistance", says="Distance between two cities.;Get the distance between two places.;How far two places are apart.", is_paired=True, parameters=[parameter("f", "from origin start city1 source", some.city), parameter("t", "to destination end city2 target", some.city)],
          asks="how far is it from {f} to {t};what is the distance between {f} and {t};how far is {f} from {t};distance from {f} to {t};how many kilometers are there from {f} to {t}", more="and from {f} to {t}", missing="how far is it to {t}>From where?;From which city?", facts=lambda rng, v: {"k": rng.randint(20, 9999)}, shapes=["{k}", {"distance": "{k}"}, {"km": "{k}"}, {"distance_km": "{k}"}, {"kilometers": "{k}"}, {"distance": "{k} km"}], answers="It is {k} km from {f} to {t}.;The distance from {f} to {t} is {k} km."),
    Known(group="table", names="book_table reserve_table make_reservation bookTable", says="Book a table in a restaurant.;Reserve a table.;Make a reservation.", parameters=[parameter("r", "restaurant name place", some.one_of(some.RESTAURANTS)), parameter("n", "people guests party_size", lambda rng: rng.randint(2, 12), "integer"), parameter("t?", "time at hour", some.time)],
          asks="!book a table at {r} for {n};!reserve a table for {n} people at {r};!book a table for {n} at {r} at {t};i need a table for {n} at {r};!get us a table at {r} for {n} people", missing="!book a table at {r};!reserve a table at {r}>For how many people?", facts=lambda rng, v: {"i": some.code(rng)}, shapes=[*DONE, {"status": "confirmed"}, {"confirmation": "{i}"}, {"booking": "{i}"}], answers="Your table for {n} at {r} is booked.;Your table for {n} at {r} is booked, with the number {i}."),
    Known(group="population", names="get_population population population_of getPopulation", says="The population of a place.;How many people live in a place.;Get a population.", parameters=[parameter("c", "country place name city", lambda rng: rng.choice(some.COUNTRIES) if rng.random() < 0.5 else some.city(rng))],
          asks="how many people live in {c};what is the population of {c};population of {c};how big is {c}", more="and in {c};what about {c}", pairs="how many people live in {c} and in {c2}", facts=lambda rng, v: {"r": rng.randint(1000, 99999999)}, shapes=["{r}", {"population": "{r}"}, {"name": "{c}", "population": "{r}"}, {"people": "{r}"}], answers="{r} people live in {c}.;The population of {c} is {r}."),
    Known(group="note", names="create_note save_note add_note take_note createNote write_note", says="Save a note.;Create a note with a title.;Write something down.", parameters=[parameter("t", "title name title", some.phrase), parameter("b", "text content body", some.body)],
          asks="!create a note called \"{t}\" with the text \"{b}\";!save a note '{t}': '{b}';!write the note \"{t}\": \"{b}\";!take a note with the title \"{t}\" and the text \"{b}\"", facts=lambda rng, v: {"i": rng.randint(1, 999)}, shapes=[*DONE, {"id": "{i}"}, {"saved": True}, {"note_id": "{i}"}], answers="I have saved the note \"{t}\".;The note \"{t}\" is saved."),
    Known(group="order", names="get_order_status order_status check_order getOrder track_order", says="Get the status of an order.;Check an order.;Where an order is.", parameters=[parameter("i", "order_id id order number", some.order)],
          asks="where is my order {i};what is the status of order {i};!check order {i};is order {i} on its way;!track order {i};status of order {i}", more="and order {i};what about {i}", pairs="!check the orders {i} and {i2};where are my orders {i} and {i2}", missing="where is my order;!check my order>What is the number of your order?;Which order do you mean?", facts=lambda rng, v: {"s": rng.choice(["shipped", "delivered", "on its way", "delayed", "ready", "cancelled", "packed", "in transit"]), "d": some.date(rng)}, shapes=["{s}", {"status": "{s}"}, {"order_id": "{i}", "status": "{s}"}, {"state": "{s}"}, {"status": "{s}", "date": "{d}"}], answers="Order {i} is {s}.;Your order {i} is {s}.;The status of order {i} is {s}."),
    Known(group="package", names="track_package track_parcel package_status trackPackage", says="Track a package.;Find out where a parcel is.", parameters=[parameter("i", "tracking_number number code id", some.code)], asks="where is my package {i};!track the package {i};!track {i};where is parcel {i};!find my package {i}", missing="where is my package;!track my package>What is the tracking number?", facts=lambda rng, v: {"c": some.city(rng), "d": some.date(rng)}, shapes=["{c}", {"location": "{c}"}, {"city": "{c}", "arrives": "{d}"}, {"location": "{c}", "eta": "{d}"}], answers="Your package is in {c}.;Your package {i} is in {c}.;Your package is in {c} and arrives on {d}."),
    Known(group="units", names="convert_units unit_converter convert convertUnits", says="Convert a value to another unit.;Unit conversion.;Convert between units.", is_paired=True, parameters=[parameter("n", "value amount x", some.size, "number"), parameter("f", "from_unit from source", some.one_of(some.UNITS)), parameter("t", "to_unit to target", some.one_of(some.UNITS))], asks="!convert {n} {f} to {t};how much is {n} {f} in {t};what is {n} {f} in {t};{n} {f} in {t};how many {t} are {n} {f}", facts=lambda rng, v: {"r": round(v["n"] * rng.uniform(0.1, 5), 2)}, shapes=[*_RESULTS, {"converted": "{r}"}], answers="{n} {f} are {r} {t}."),
    Known(group="recipe", names="find_recipe get_recipe search_recipes recipe findRecipe", says="Find a recipe.;Get the recipe of a dish.;Look up how to cook something.", parameters=[parameter("d", "dish query name food", some.one_of(some.DISHES))], asks="!find a recipe for {d};how do i make {d};how do i cook {d};!give me a recipe for {d};recipe for {d};i want to cook {d}", missing="!find a recipe;!give me a recipe>For which dish?", facts=lambda rng, v: {"x": listed(rng.sample(w.FOODS, 3)), "m": rng.randint(5, 90)}, shapes=[{"ingredients": "{x}"}, {"recipe": "{d}", "minutes": "{m}"}, {"time": "{m} minutes", "ingredients": "{x}"}, "{x}", {"minutes": "{m}"}], answers="For {d} you need {x}.;It takes {m} minutes to make {d}.;For {d} you need {x}, and it takes {m} minutes."),
    Known(group="dictionary", names="define_word define dictionary get_definition defineWord lookup_word", says="The definition of a word.;Look up a word in the dictionary.;Define a word.", parameters=[parameter("x", "word term word", text.any_word)], asks="what does {x} mean;!define {x};what is the meaning of {x};what is the definition of {x};!look up the word {x}", more="and {x};what does {x} mean", pairs="!define {x} and {x2}", missing="!define a word>Which word?", facts=lambda rng, v: {"r": f"{a(rng.choice(w.ADJECTIVES))} {rng.choice(w.THINGS + w.ANIMALS + w.PLACES)}"}, shapes=["{r}", {"definition": "{r}"}, {"word": "{x}", "definition": "{r}"}, {"meaning": "{r}"}], answers="{x} means: {r}.;The definition of {x} is: {r}."),
    Known(group="film", names="get_movie_rating movie_rating film_info rate_movie getMovie", says="Get the rating of a movie.;Look up a film.;Rating of a film.", parameters=[parameter("t", "title movie film name", some.film)], asks="how good is the movie {t};what is the rating of {t};is {t} a good film;rating of the film {t};!look up the movie {t}", more="and {t};what about {t}", pairs="!compare the ratings of {t} and {t2}", missing="is it a good film;how good is the movie>Which movie do you mean?", facts=lambda rng, v: {"r": round(rng.uniform(1, 10), 1), "y": rng.randint(1930, 2025)}, shapes=["{r}", {"rating": "{r}"}, {"title": "{t}", "rating": "{r}"}, {"title": "{t}", "year": "{y}", "rating": "{r}"}, {"score": "{r}"}], answers="The rating of {t} is {r}.;{t} has a rating of {r}.;{t} is from {y} and has a rating of {r}."),
    Known(group="shop", names="get_price product_price check_price getPrice price_of", says="The price of a product.;Get what a product costs.", parameters=[parameter("x", "product item name", some.one_of(some.PRODUCTS))], asks="how much is the {x};what does the {x} cost;what is the price of the {x};price of the {x}", more="and the {x};what about the {x}", pairs="how much are the {x} and the {x2}", facts=lambda rng, v: {"r": some.price(rng), "k": rng.choice(["USD", "EUR", "dollars", "euros"])}, shapes=["{r}", {"price": "{r}"}, {"product": "{x}", "price": "{r}"}, {"price": "{r}", "currency": "{k}"}, "{r} {k}"], answers="The {x} costs {r}.;The price of the {x} is {r}.;The {x} costs {r} {k}."),
    Known(group="shop", names="check_stock inventory get_stock checkStock stock_level", says="How many pieces of a product are there.;Check the stock of a product.;Inventory of a product.", parameters=[parameter("x", "product item sku", some.one_of(some.PRODUCTS))], asks="how many of the {x} do we have;is the {x} in stock;!check the stock of the {x};how many pieces of the {x} are left", facts=lambda rng, v: {"r": rng.randint(0, 999)}, shapes=["{r}", {"stock": "{r}"}, {"product": "{x}", "quantity": "{r}"}, {"count": "{r}"}, {"available": "{r}"}], answers="There are {r} of the {x} in stock.;The stock of the {x} is {r}."),
    Known(group="bank", names="get_balance account_balance balance getBalance check_balance", says="The balance of an account.;Get an account's balance.", parameters=[parameter("x", "account account_id account_type", "checking savings business")], asks="what is the balance of my {x} account;how much money is in my {x} account;!show the {x} balance;!check my {x} account", pairs="what are the balances of my {x} and my {x2} accounts", missing="what is my balance;how much money do i have>Which account: checking, savings or business?", facts=lambda rng, v: {"r": round(rng.uniform(0, 20000), 2)}, shapes=["{r}", {"balance": "{r}"}, {"account": "{x}", "balance": "{r}"}, {"amount": "{r}"}], answers="The balance of your {x} account is {r}.;Your {x} account has {r}."),
    Known(group="file", names="read_file open_file readFile cat load_file get_file", says="Read a file.;Return the text of a file.;Reads a file from disk.", parameters=[parameter("f", "path file filename file_path", some.one_of(some.FILES))], asks="!read {f};!open the file {f};what is in {f};what does {f} say;!show me {f};!read the file {f}", more="and {f};now {f}", missing="!read a file;!open a file>Which file?", facts=lambda rng, v: {"r": some.phrase(rng)}, shapes=["{r}", {"content": "{r}"}, {"text": "{r}"}, {"file": "{f}", "content": "{r}"}], answers="{f} says: {r};The file {f} says: {r};In {f} is: {r}"),
    Known(group="file", names="list_files ls list_directory listFiles list_dir", says="List the files in a folder.;Show what is in a folder.", parameters=[parameter("f", "path folder directory", some.one_of(some.FOLDERS))], asks="!list the files in {f};what files are in {f};what is in the folder {f};!show the files in {f}", facts=lambda rng, v: {"L": rng.sample(some.FILES, rng.randint(1, 4))}, shapes=["{L}", {"files": "{L}"}, {"folder": "{f}", "files": "{L}"}], answers="The files in {f} are {L}.;In {f} there are {L}."),
    Known(group="flight", names="book_flight search_flights find_flight bookFlight flights", says="Find a flight.;Search flights between two cities.;Book a flight.", is_paired=True, parameters=[parameter("f", "from origin departure source", some.city), parameter("t", "to destination arrival target", some.city), parameter("d", "date date day when", some.date)], asks="!book a flight from {f} to {t} on {d};!find a flight from {f} to {t} on {d};is there a flight from {f} to {t} on {d};i want to fly from {f} to {t} on {d}", missing="!book a flight from {f} to {t};i want to fly from {f} to {t}>On which day?;On which date?", facts=lambda rng, v: {"n": f"{rng.choice('ABLKQTX')}{rng.choice('AFHKZ')}{rng.randint(10, 999)}", "r": rng.randint(40, 900)}, shapes=[{"flight": "{n}"}, {"flight": "{n}", "price": "{r}"}, {"number": "{n}", "price": "{r}"}, "{n}"], answers="I found flight {n} from {f} to {t}.;Flight {n} from {f} to {t} costs {r}."),
    Known(group="words", names="count_words word_count countWords num_words", says="Count the words of a text.;Number of words.", parameters=[parameter("x", "text text input", some.phrase)], asks="how many words are in \"{x}\";!count the words in '{x}';!count the words of \"{x}\"", facts=lambda rng, v: {"r": len(v["x"].split())}, shapes=[*_RESULTS, {"count": "{r}"}, {"words": "{r}"}], answers="The text has {r} words.;There are {r} words in \"{x}\"."),
]
# fmt: on


def _value_of(expression: str) -> int:
    """Compute an expression that `some.expression` has made."""
    tokens = re.findall(r"\d+|[-+*()]", expression)
    total, at = _total(tokens, 0)
    assert at == len(tokens), expression
    return total


def _total(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in "+-":
        other, after = _product(tokens, at + 1)
        value, at = (value + other if tokens[at] == "+" else value - other), after
    return value, at


def _product(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _atom(tokens, at)
    while at < len(tokens) and tokens[at] == "*":
        other, at = _atom(tokens, at + 1)
        value *= other
    return value, at


def _atom(tokens: list[str], at: int) -> tuple[int, int]:
    if tokens[at] == "(":
        value, at = _total(tokens, at + 1)
        return value, at + 1
    return int(tokens[at]), at + 1
