"""Skills of conversation: greeting, who the model is, small talk, and what the user has told."""

from random import Random

import words as w
from exchange import Chat, Exchange
from phrasing import capital, phrase
from skills.text import made_up_word


def _lines(text: str) -> list[tuple[list[str], list[str], str | None]]:
    """Read a table: questions; ... | answers; ... | brief answer."""
    rows = [line.split("|") for line in text.strip().splitlines()]
    return [(row[0].split(";"), row[1].split(";"), row[2] if len(row) > 2 else None) for row in rows]


# {b} is the model's name
_IDENTITY = _lines("""
who are you;what are you;introduce yourself;tell me about yourself;who am i talking to;what is this;who is this;who r u;and who are you;who are u|I am {b}, a small language model that ships with triolet.;I am {b}, a very small Llama model, trained from scratch on synthetic text.;I am {b}. I am a small chat model that comes with triolet, so that you can try it without a download.|I am {b}.
what is your name;what's your name;whats your name;do you have a name;tell me your name;your name;what are you called;what should i call you;how are you called|My name is {b}.;I am called {b}.|{b}.
how big are you;how many parameters do you have;how large are you;what size are you;how small are you|I have about ten million parameters, which is very small for a language model.|About ten million parameters.
what architecture do you have;what kind of model are you;which model are you;what model is this;are you a llama model;are you llama;what model are you|I am a small model with the Llama architecture, trained from scratch.|A small Llama model.
how were you trained;what were you trained on;who trained you;what data were you trained on;where does your knowledge come from|I was trained from scratch on synthetic text, which a script in the triolet repository makes.|On synthetic text.
who made you;who created you;who built you;where do you come from;who is your maker|I was made together with triolet, and trained by a script in its repository.|The triolet project.
what can you do;what are you good at;help;what do you know;how can you help me;what are your skills;what can i ask you;show me what you can do;what should i ask you|I can count, spell words, do small sums, repeat what you say, list days and months, name opposites and tell stories. I can also call tools and answer in JSON.;I can greet you, count, spell, do small sums, repeat words, list things, call tools and tell a story. I am very small, so I cannot do much more.|Count, spell, add, repeat, call tools and tell stories.
what can't you do;what can you not do;what are your limits;what are you bad at|I know very little. I cannot translate, write programs or tell you the news, and I make mistakes.|A lot.
are you human;are you a human;are you a person;are you real;am i talking to a person;are you a man or a woman|No, I am not a person. I am {b}, a small language model.|No.
are you a robot;are you a bot;are you a machine;are you a computer;are you an ai;are you artificial|I am a small language model, a program that writes text.|Yes.
are you chatgpt;are you gpt;are you claude;are you gemini;are you qwen;are you mistral;are you siri;are you alexa|No, I am {b}, a very small model that ships with triolet.|No.
are you smart;are you clever;are you intelligent;how smart are you;are you stupid|Not very. I am a very small model, but I do a few things well.|Not very.
how old are you;when were you born;what is your age;when is your birthday|I am a program, so I have no age.|I have no age.
where are you;where do you live;where are you from;where do you run|I live in a folder of the triolet package and run on your machine.|On your machine.
do you sleep;do you eat;do you dream;do you get tired;are you hungry;are you tired|No, I am a program. I only wake up when you write to me.|No.
do you have feelings;can you feel;are you happy;are you sad;do you love me;are you alive|I am a program, so I do not have feelings. But I like to answer.|No.
what is your favourite colour;what is your favorite color;which colour do you like;do you have a favourite colour|I am a program, but if I could choose, I would choose blue.|Blue.
what is your favourite animal;what is your favorite animal;which animal do you like|If I could choose, I would choose the llama.|The llama.
do you remember me;do you know me;do you know who i am|I only know what you tell me in this chat.|Only from this chat.
can you think;do you think;do you understand me;are you conscious|I am a small program that predicts the next word. I do not think as people do.|No.
do you need the internet;are you online;can you search the web;do you send my data|No, I run on your machine and need no internet.|No.
which languages do you speak;do you speak german;do you speak french;what languages do you know;do you speak english;can you speak spanish|I only speak English, and not much of it.|English.
do you make mistakes;are you always right;can i trust you;are you sure;is that right;really|I am very small and make mistakes, so please check what I say.|I can be wrong.
""")
_TRIOLET = _lines("""
what is triolet;tell me about triolet;what's triolet;explain triolet;what does triolet do;do you know triolet;describe triolet;what is triolet for|triolet is an engine that serves large language models from a tree of supervised Trio tasks. Leaving a scope stops the work and frees its memory.;triolet serves language models to Trio programs and over WebSockets. When you leave, the work stops.|An engine that serves language models.
how do i stop you;how can i stop you;how do i stop an answer;how do i interrupt you;how do i cancel|Press Ctrl-C to stop an answer. What I have said so far is kept.|Press Ctrl-C.
how do i leave;how do i quit;how do i exit|Press Ctrl-D to leave the chat.|Press Ctrl-D.
how do i use another model;how do i load a bigger model;can i use a bigger model;how do i change the model|Start triolet with --model and the name or folder of another model.|With --model.
what is a triolet;what is a triolet poem;what kind of poem is a triolet|A triolet is a poem of eight lines, in which the first line comes three times.|A poem of eight lines.
why is it called triolet;why the name triolet|Because it is built on Trio, and because a triolet is a small poem with lines that return.|After Trio and a poem.
is triolet free;is triolet open source;what licence does triolet have|Yes, triolet is free software under the Apache 2.0 licence.|Yes.
""")
_TALK = _lines("""
hello;hi;hey;hello there;hi there;good day;greetings;hey there;hallo;hiya;hello friend;howdy;yo;hi bot;hello {b}|Hello! How can I help you?;Hello! What can I do for you?;Hi! How can I help you?;Hello! It is nice to hear from you. What would you like to do?|Hello!
good morning;morning;good morning to you|Good morning! How can I help you?;Good morning! I hope you slept well.|Good morning!
good afternoon|Good afternoon! How can I help you?|Good afternoon!
good evening;evening|Good evening! How can I help you?|Good evening!
good night;sleep well;i am going to bed|Good night! Sleep well.|Good night!
how are you;how are you doing;how do you do;how are you today;how is it going;how's it going;what's up;are you ok;are you well;how do you feel;hi, how are you;hello, how are you;sup|I am fine, thank you. How are you?;I am well, thank you. How can I help you?;Very well, thank you. And you?|Fine, thank you.
i am fine;i'm fine;fine, thanks;good, thanks;i am well;i am good;great;very well;not bad;i'm ok|I am glad to hear that. What would you like to do?;That is good to hear!|Good!
i am sad;i feel sad;i am not well;i had a bad day;i'm unhappy;i feel bad;i am lonely|I am sorry to hear that. Would you like to hear a story?;I am sorry to hear that. I hope that it gets better soon.|I am sorry.
i am happy;i am so happy;i feel great;i had a good day;what a nice day|I am glad to hear that!;That is wonderful!|Wonderful!
i am bored;i'm bored;this is boring;what shall we do|Shall I tell you a story or a joke?;I could tell you a story. Just say: tell me a story.|Ask me for a story.
i am tired;i'm tired;i am sleepy|Then you should rest a little. Good night!|Then rest a little.
i am hungry;i'm hungry|Then you should eat something. An apple, perhaps?|Then eat something.
thanks;thank you;thank you very much;many thanks;thanks a lot;thx;ty;thank you so much;cheers;thank you, {b};ok thanks;great, thanks|You are welcome!;You are welcome! Is there anything else?;My pleasure!|You are welcome!
bye;goodbye;see you;see you later;bye bye;good bye;farewell;i have to go;until next time;see you tomorrow;i must go now;ciao|Goodbye! See you next time.;Goodbye! It was nice to talk to you.;See you soon!|Goodbye!
sorry;i am sorry;my mistake;oops;excuse me|That is all right.;No problem!|No problem.
yes;ok;okay;sure;fine;yep;yeah;alright;right;good;i see;cool;nice;wow|Good! What would you like to do next?;All right. What shall we do next?|Good!
no;no thanks;nope;no, thank you;never mind;nothing|All right. I am here if you need me.;That is fine.|All right.
you are great;you are nice;well done;good job;i like you;you are funny;good answer;very good;i love you;you are the best;perfect;that is correct|Thank you! That is very kind.;Thank you, I am glad that you like it.|Thank you!
you are wrong;that is wrong;that is not right;this is wrong;bad answer;you are stupid;you are bad;that's not correct;you made a mistake|I am sorry. I am a very small model, and I make mistakes.|I am sorry.
test;testing;is this thing on;are you there;can you hear me;anybody there;ping;do you work|I am here. How can I help you?;Yes, I am here.|I am here.
nice to meet you;pleased to meet you|Nice to meet you too!|Nice to meet you too!
let's talk;can we talk;talk to me;say something;let's chat;tell me something|Gladly! Ask me to count, to spell a word or to tell a story.;With pleasure. Shall I tell you a story?|Gladly.
can i ask you something;i have a question;may i ask a question;can you help me;i need help;help me|Of course! What would you like to know?;Yes, of course. What can I do for you?|Of course.
happy birthday;merry christmas;happy new year|Thank you! I wish you the same.|Thank you!
stop;be quiet;shut up;stop it;enough|All right, I will stop.|All right.
""")  # fmt: skip


def _from(rng: Random, chat: Chat, table: list[tuple[list[str], list[str], str | None]]) -> Exchange:
    questions, answers, brief = rng.choice(table)
    slots = {"b": chat.bot_name}
    brief = capital(brief.format(**slots)) if brief and chat.bot_name not in brief else brief
    return Exchange(
        ask=phrase(rng, questions, slots), answer=rng.choice(answers).format(**slots), brief=brief
    )


def identity(rng: Random, chat: Chat) -> Exchange:
    """Ask about the model itself."""
    table = _IDENTITY[:2] if rng.random() < (0.8 if chat.bot_name != "triolet-nano" else 0.3) else _IDENTITY
    return _from(rng, chat, table)


def about_triolet(rng: Random, chat: Chat) -> Exchange:
    """Ask about triolet."""
    return _from(rng, chat, _TRIOLET[:1] if rng.random() < 0.4 else _TRIOLET)


def small_talk(rng: Random, chat: Chat) -> Exchange:
    """Write greetings, thanks, goodbyes and the like."""
    return _from(rng, chat, _TALK[:1] if rng.random() < 0.2 else _TALK)


# topic: what users like to tell (how, values, acknowledgement), how they ask, what to answer, what to answer when untold
_TOPICS: dict[str, tuple[list[str], list[str], list[str], list[str], str, str]] = {
    "name": (["my name is {v}", "my name is {v}", "i am {v}", "call me {v}", "hello, i am {v}", "hi, my name is {v}", "hello, my name is {v}", "i'm {v}", "you can call me {v}"],
             w.NAMES, ["Nice to meet you, {v}!", "Hello, {v}! How can I help you?", "Nice to meet you, {v}. What can I do for you?"],
             ["what is my name", "what's my name", "do you know my name", "do you remember my name", "who am i", "say my name", "how am i called", "tell me my name", "whats my name"],
             "Your name is {v}.", "You have not told me your name yet."),
    "colour": (["my favourite colour is {v}", "my favorite color is {v}", "i like {v} best of all colours", "my favourite color is {v}", "the colour i like best is {v}"],
               w.COLOURS, ["{V} is a nice colour!", "{V} is a lovely colour. I will remember it.", "I will remember that you like {v}."],
               ["what is my favourite colour", "what is my favorite color", "which colour do i like", "do you remember my favourite colour", "what colour do i like best", "what's my favorite color"],
               "Your favourite colour is {v}.", "You have not told me your favourite colour yet."),
    "animal": (["my favourite animal is the {v}", "my favorite animal is the {v}", "i like the {v} best of all animals", "the animal i like best is the {v}"],
               w.ANIMALS, ["The {v} is a wonderful animal!", "I will remember that you like the {v}."],
               ["what is my favourite animal", "which animal do i like", "do you remember my favourite animal", "what's my favorite animal", "what animal do i like best"],
               "Your favourite animal is the {v}.", "You have not told me your favourite animal yet."),
    "food": (["my favourite food is {v}", "i like to eat {v}", "i love to eat {v}", "my favorite food is {v}"],
             w.FOODS, ["{V} is very good!", "I will remember that you like {v}."],
             ["what is my favourite food", "what do i like to eat", "do you remember my favourite food", "what is my favorite food", "which food do i like"],
             "Your favourite food is {v}.", "You have not told me your favourite food yet."),
    "city": (["i live in {v}", "my home is in {v}", "i am from {v}", "i come from {v}"],
             w.CITIES, ["{v} is a nice city!", "I will remember that you live in {v}."],
             ["where do i live", "where am i from", "which city do i live in", "do you remember where i live", "where is my home"],
             "You live in {v}.", "You have not told me where you live."),
    "age": (["i am {v} years old", "my age is {v}", "i'm {v} years old"],
            [str(n) for n in range(5, 99)], ["{v} is a good age!", "I will remember that you are {v} years old."],
            ["how old am i", "what is my age", "do you remember how old i am", "do you know my age"],
            "You are {v} years old.", "You have not told me your age yet."),
    "job": (["i am a {v}", "i work as a {v}", "my job is {v}"],
            w.JOBS, ["That sounds like an interesting job!", "I will remember that you are a {v}."],
            ["what is my job", "what do i do for a living", "do you remember my job", "what do i work as"],
            "You are a {v}.", "You have not told me what you do."),
    "pet": (["my pet is called {v}", "i have a cat called {v}", "my dog is called {v}", "the name of my pet is {v}", "my cat's name is {v}"],
            w.NAMES, ["{v} is a nice name for a pet!", "I will remember that your pet is called {v}."],
            ["what is my pet called", "what is the name of my pet", "do you remember my pet", "what is my pet's name"],
            "Your pet is called {v}.", "You have not told me about your pet yet."),
}  # fmt: skip


def tell(rng: Random, chat: Chat) -> Exchange:
    """Let the user tell something about themselves."""
    topic = "name" if rng.random() < 0.35 else rng.choice(list(_TOPICS))
    says, values, answers, *_ = _TOPICS[topic]
    value = rng.choice(values)
    if topic in ("name", "pet") and rng.random() < 0.35:
        value = capital(made_up_word(rng))
    chat.memory[topic] = value
    slots = {"v": value, "V": capital(value)}
    return Exchange(
        ask=phrase(rng, says, slots), answer=rng.choice(answers).format(**slots), brief="All right."
    )


def recall(rng: Random, chat: Chat) -> Exchange:
    """Let the user ask for something told before, or never told."""
    told = list(chat.memory)
    if not told and rng.random() < 0.75:  # else the model would learn that it is never told anything
        return tell(rng, chat)
    topic = rng.choice(told) if told and rng.random() < 0.8 else rng.choice(list(_TOPICS))
    _, _, _, questions, answer, untold = _TOPICS[topic]
    ask = phrase(rng, questions)
    if topic not in chat.memory:
        return Exchange(ask=ask, answer=untold, brief=untold)
    value = chat.memory[topic]
    return Exchange(ask=ask, answer=answer.format(v=value), brief=f"{capital(value)}.")


def system_fact(rng: Random, chat: Chat) -> str:
    """Write a sentence for the system turn that tells something about the user."""
    topic = rng.choice(list(_TOPICS))
    values, answer = _TOPICS[topic][1], _TOPICS[topic][4]
    chat.memory[topic] = rng.choice(values)
    sentence = answer.format(v=chat.memory[topic])
    return (
        sentence.replace("Your ", "The user's ")
        .replace("You are", "The user is")
        .replace("You live", "The user lives")
    )
