"""Hand-written forms that training never sees: what users of the OpenAI API might send as a JSON schema."""

from collections.abc import Sequence
from typing import Any

import attrs

Schema = dict[str, Any]


@attrs.frozen
class Form:
    """An ask with the schema of its answer.

    Attributes:
        ask: what the user says.
        schema: JSON schema of the answer.
        expected: values that the ask states, which the answer has to copy; None where all is made up.
    """

    ask: str
    schema: Schema
    expected: dict[str, Any] | None = None


def _closed(properties: Schema, *, optional: Sequence[str] = (), defs: Schema | None = None) -> Schema:
    """Write an object that has no other keys."""
    return {**_open(properties, optional=optional, defs=defs), "additionalProperties": False}


def _open(properties: Schema, *, optional: Sequence[str] = (), defs: Schema | None = None) -> Schema:
    """Write an object that does not say whether it has other keys."""
    required = [key for key in properties if key not in optional]
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "$defs": defs} if defs else schema


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))

# fmt: off
FORMS: list[Form] = [
    # what the ask states
    Form("Pull the planet facts out of this line: Kepler-9 orbits the star Vega and has 3 moons.", _closed({"planetName": _STRING, "hostStar": _STRING, "moonCount": _INTEGER}), {"planetName": "Kepler-9", "hostStar": "Vega", "moonCount": 3}),
    Form("Log this workout: 12 push-ups and 30 squats by Mara.", _closed({"athlete": _STRING, "pushUps": _INTEGER, "squats": _INTEGER}), {"athlete": "Mara", "pushUps": 12, "squats": 30}),
    Form("Structure the prescription. Dr. Hale prescribes Ibuprofen, 2 pills a day, for Mr. Doyle.", _closed({"drug": _STRING, "prescriber": _STRING, "pills_per_day": _INTEGER, "prescribed_for": _STRING}), {"drug": "Ibuprofen", "pills_per_day": 2}),
    Form("Bird sighting: two herons at Loch Ness, seen by Fiona on 2023-04-17.", _open({"bird": _STRING, "seenBy": _STRING, "seenOn": {"type": "string", "format": "date"}, "lake": _STRING}), {"seenBy": "Fiona", "seenOn": "2023-04-17", "lake": "Loch Ness"}),
    Form("Commit 4f2a by Linus fixes the parser. Write the commit down.", _closed({"sha": _STRING, "committer": _STRING, "changelog": _STRING}), {"sha": "4f2a", "committer": "Linus"}),
    Form("Volcano report: Etna, 3357 metres, last erupted 2021.", _closed({"volcano": _STRING, "elevation_m": _INTEGER, "last_eruption": _INTEGER}), {"volcano": "Etna", "elevation_m": 3357, "last_eruption": 2021}),
    Form("Parking fine for plate KX-221, 35 dollars, zone B.", _closed({"plateText": _STRING, "fineAmount": _NUMBER, "parkingZone": _STRING}), {"plateText": "KX-221", "fineAmount": 35, "parkingZone": "B"}),
    Form("Which arguments does the command get? backup --source /home --keep 7", _closed({"command": _STRING, "source_path": _STRING, "keep_days": _INTEGER}), {"command": "backup", "source_path": "/home", "keep_days": 7}),
    Form("Podcast episode 41, 'Deep Sea Myths', hosted by Oren.", _open({"episode": _INTEGER, "episodeTitle": _STRING, "hostedBy": _STRING}), {"episode": 41, "episodeTitle": "Deep Sea Myths", "hostedBy": "Oren"}),
    Form("Tram 9 goes to the harbour at 07:42 from platform 3.", _closed({"tram": _INTEGER, "platform": _INTEGER, "leaves": _STRING, "bound_for": _STRING}), {"tram": 9, "platform": 3, "leaves": "07:42"}),
    Form("Mineral card. Quartz has hardness 7 and is white.", _closed({"mineral": _STRING, "mohs_hardness": _NUMBER, "luster": _or_null(_STRING)}), {"mineral": "Quartz", "mohs_hardness": 7}),
    Form("Server config from: host db1, port 5432, ssl on", _closed({"dbHost": _STRING, "port": _INTEGER, "ssl": _BOOLEAN}), {"dbHost": "db1", "port": 5432, "ssl": True}),
    Form("The museum shows a vase from Crete, made of bronze, catalogued as M77.", _closed({"exhibit": _STRING, "catalogue_no": _STRING, "provenance": _STRING}), {"exhibit": "vase", "catalogue_no": "M77", "provenance": "Crete"}),
    Form("Meter 8812 read 415 kWh in the basement.", _closed({"meterNo": _INTEGER, "kwh": _INTEGER, "installedIn": _STRING}), {"meterNo": 8812, "kwh": 415, "installedIn": "basement"}),
    Form("Translate record: 'hond' is Dutch for dog.", _closed({"foreignWord": _STRING, "tongue": _STRING, "englishWord": _STRING}), {"foreignWord": "hond", "tongue": "Dutch", "englishWord": "dog"}),
    Form("A container with 18 tons of coffee sails from Santos to Rotterdam.", _closed({"cargo": _STRING, "tons": _NUMBER, "loading_port": _STRING, "unloading_port": _STRING}), {"cargo": "coffee", "tons": 18, "loading_port": "Santos", "unloading_port": "Rotterdam"}),
    Form("Who is in the band? Iggy plays bass, Nell plays drums.", _closed({"bandMembers": _list(_closed({"musician": _STRING, "instrument": _STRING}), minItems=2, maxItems=2)}), {"bandMembers": [{"musician": "Iggy", "instrument": "bass"}, {"musician": "Nell", "instrument": "drums"}]}),
    Form("Medal table entry: Norway won 16 gold, 8 silver and 13 bronze.", _closed({"delegation": _STRING, "medals": _closed({"gold": _INTEGER, "silver": _INTEGER, "bronze": _INTEGER})}), {"delegation": "Norway", "medals": {"gold": 16, "silver": 8, "bronze": 13}}),
    Form("Read the label: Granola bar, 210 kcal, contains nuts and soy.", _closed({"labelName": _STRING, "kcal": _INTEGER, "mayContain": _list(_STRING, maxItems=4)}), {"labelName": "Granola bar", "kcal": 210, "mayContain": ["nuts", "soy"]}),
    Form("Vote result: Alvarez 120, Tanner 98.", _open({"ballots": _list({"$ref": "#/$defs/Tally"}, maxItems=3)}, defs={"Tally": _closed({"candidate": _STRING, "ballotCount": _INTEGER})}), {"ballots": [{"candidate": "Alvarez", "ballotCount": 120}, {"candidate": "Tanner", "ballotCount": 98}]}),
    Form("Gate change! BA117 now leaves from gate C9.", _closed({"flightCode": _STRING, "gate": _STRING, "isDelayed": _or_null(_BOOLEAN)}), {"flightCode": "BA117", "gate": "C9"}),
    Form("Put the knitting pattern in a record: 64 stitches, yarn Merino, needles 4 mm.", _closed({"stitches": _INTEGER, "yarn": _STRING, "needleMm": _NUMBER}), {"stitches": 64, "yarn": "Merino", "needleMm": 4}),
    Form("Chess: Magnus played e4 and Hikaru answered c5.", _closed({"white_player": _STRING, "black_player": _STRING, "opening_moves": _list(_STRING, minItems=2, maxItems=2)}), {"white_player": "Magnus", "black_player": "Hikaru", "opening_moves": ["e4", "c5"]}),
    Form("Beehive 5 gave 11 jars of honey, says the beekeeper Tomas.", _closed({"beehive": _INTEGER, "jars": _INTEGER, "beekeeper": _STRING}), {"beehive": 5, "jars": 11, "beekeeper": "Tomas"}),
    Form("Grade the mood of the crowd: they cheered and clapped all evening.", _closed({"crowdMood": {"type": "string", "enum": ["cheerful", "bored", "hostile"]}}), {"crowdMood": "cheerful"}),
    # what is right whatever it is called
    Form("If a box holds 6 pens and I add 3, what is in it?", _closed({"penTotal": _INTEGER}), {"penTotal": 9}),
    Form("Solve 8 + 7 and show your work.", _closed({"workings": _list(_STRING, minItems=1, maxItems=3), "final": _INTEGER}), {"final": 15}),
    # what has to be made up
    Form("Design a spaceship.", _closed({"shipName": _STRING, "crewSize": _INTEGER, "engines": _list(_STRING, minItems=1, maxItems=3), "isArmed": _BOOLEAN})),
    Form("Come up with a villain for my comic.", _closed({"alias": _STRING, "lair": _STRING, "henchmen": _INTEGER, "evilPlan": _STRING})),
    Form("I want a weekly gym schedule.", _open({"schedule": _list(_closed({"onDay": {"enum": ["Mon", "Wed", "Fri"]}, "exercise": _STRING, "reps": _INTEGER}), minItems=1, maxItems=3)})),
    Form("Pick a brand palette for a bakery.", _closed({"primaryHex": {"type": "string", "maxLength": 9}, "accent": _STRING, "rationale": _STRING})),
    Form("Propose a name for our new cafe's mascot.", _closed({"mascotName": _STRING, "tagline": _STRING}, optional=("tagline",))),
    Form("Simulate a dice roll.", _closed({"pips": {"type": "integer", "minimum": 1, "maximum": 6}})),
    Form("Draft a quiz question about space.", _closed({"prompt": _STRING, "alternatives": _list(_STRING, minItems=3, maxItems=4), "correctIndex": {"type": "integer", "minimum": 0, "maximum": 3}})),
    Form("Should I take an umbrella today?", _closed({"verdict": {"enum": ["yes", "no", "maybe"]}, "because": _STRING})),
    Form("Mock an API error.", _open({"error_code": _INTEGER, "error_text": _STRING, "retryable": _BOOLEAN})),
    Form("Set up a chess club.", _closed({"clubName": _STRING, "founder": _STRING, "meetsEvery": {"enum": ["week", "month"]}, "roster": _list(_STRING, maxItems=3)})),
    Form("Haiku, please.", _closed({"verses": _list(_STRING, minItems=3, maxItems=3)})),
    Form("Plan my garden bed.", _closed({"plants": _list({"$ref": "#/$defs/Plant"}, minItems=1, maxItems=2), "sunHours": _NUMBER}, defs={"Plant": _closed({"plantName": _STRING, "spacing_cm": _INTEGER})})),
    Form("Dream up an island nation.", _closed({"islandName": _STRING, "ruler": _STRING, "exports": _list(_STRING, minItems=1, maxItems=3), "coastlineKm": _NUMBER, "foundedOn": {"type": "string", "format": "date"}})),
    Form("Configure a feature flag for dark mode.", _closed({"flagKey": _STRING, "rolloutPercent": {"type": "integer", "minimum": 0, "maximum": 100}, "enabledFor": _list({"enum": ["beta", "staff", "everyone"]}, minItems=1, maxItems=2)})),
    Form("Which dog breed suits a small flat?", _closed({"suggestedBreed": _STRING, "barksALot": _BOOLEAN, "kilograms": _NUMBER})),
    Form("Roleplay a shopkeeper who greets me.", _closed({"line": _STRING, "gesture": _or_null(_STRING)})),
    Form("Name a constellation and one star in it.", _closed({"constellation": _STRING, "brightestStar": _closed({"starName": _STRING, "magnitude": _NUMBER})})),
    Form("Write a fortune cookie.", _closed({"fortune": _STRING, "luckyNumbers": _list({"type": "integer", "minimum": 1, "maximum": 49}, minItems=1, maxItems=6)})),
    Form("Give a toast for the wedding of Ann and Joe.", _open({"toast": _STRING, "couple": _list(_STRING, minItems=2, maxItems=2)}), {"couple": ["Ann", "Joe"]}),
    Form("Return a tree of folders.", _closed({"folder": _STRING, "subfolders": _list(_closed({"folder": _STRING, "files": _INTEGER}), maxItems=2)})),
    Form("How sure are you that water is wet?", _closed({"certaintyLevel": {"type": "number", "minimum": 0, "maximum": 1}, "caveat": _or_null(_STRING)})),
    Form("Build a fantasy sword.", _closed({"swordName": _STRING, "forgedBy": _STRING, "sharpness": {"type": "integer", "minimum": 1, "maximum": 10}, "runes": _list(_STRING, maxItems=3), "cursed": _BOOLEAN})),
    Form("Set an alarm to wake me at 06:30 on weekdays.", _closed({"alarmAt": _STRING, "repeats": {"enum": ["never", "daily", "weekdays"]}, "snoozeMinutes": _INTEGER}, optional=("snoozeMinutes",)), {"alarmAt": "06:30", "repeats": "weekdays"}),
]
# fmt: on
