"""What users ask for in forms: people, products, events and more, with the sentences that tell of them."""

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class Domain:
    """What users ask about.

    Attributes:
        nouns: what it is called.
        fields: of each slot of the texts, the kind of its values, and the keys that it may have.
        texts: sentences with slots; behind "|" are further values that the sentence implies, as `slot=JSON`.
    """

    nouns: Sequence[str]
    fields: Mapping[str, tuple[str, Sequence[str]]]
    texts: Sequence[str]


def _domain(nouns: str, fields: str, texts: str) -> Domain:
    """Read a domain: nouns;...  fields `slot:kind:key,key`;... and one text a line."""
    parsed: dict[str, tuple[str, Sequence[str]]] = {}
    for each in fields.split(";"):
        slot, kind, *keys = each.strip().split(":")
        parsed[slot] = (kind, keys[0].split(",") if keys else [slot])
    return Domain(nouns.split(";"), parsed, texts.strip().splitlines())


# fmt: off
DOMAINS = [
    _domain("person;user;user profile;employee;user account;patient;member;character", "name:person:name,full name,name,person,person name;age:age:age,age,age in years;city:city:city,location,home city,lives in,city;job:job:job,occupation,profession,job title;hobbies:hobbies:hobbies,interests,likes;email:email:email,email address;country:country;member:bool:is member,member,has account", """
{name} is {age} years old and lives in {city}.
{name} is a {job} from {city}.
My name is {name}, I am {age} years old and I work as a {job}.
{name}, {age}, {city}
{name} ({age}) is a {job} and lives in {city}.
{name} lives in {city} and likes {hobbies}.
I met {name} yesterday, a {age}-year-old {job} from {city}.
{name} works in {city} as a {job}. You can write to {email}.
Hi, I'm {name} and I'm {age}.
In {city} lives {name}, who is {age} and likes {hobbies}.
{name} from {country} is {age} and enjoys {hobbies}.
{name} ({email}) is a member since last year.|member=true
{name}, {age}, does not have an account.|member=false"""),
    _domain("contact;contact card;business card;lead;signature", "name:person:name,full name,contact name;email:email:email,email address,mail;phone:phone:phone,phone number,tel;company:company:company,employer,organization;city:city:city,town", """
You can reach {name} at {email} or {phone}.
{name}, {company}, {email}
Call {name} of {company}: {phone}
{name} from {company} in {city} has the number {phone}.
Write to {name} at {email}.
Contact: {name}, phone {phone}, {city}"""),
    _domain("product;item;article;product listing;offer", "product:product:product,name,product name,item;price:price:price,cost,price;colour:colour:color,colour;brand:brand:brand,maker,manufacturer;stock:bool:in stock,available,is available;quantity:quantity:quantity,amount,stock;features:features;rating:rating:rating,stars;material:material", """
The {brand} {product} costs {price} dollars.
A {colour} {product} for {price} euros.
{product}, {colour}, ${price}
The {product} from {brand} is in stock and costs ${price}.|stock=true
The {brand} {product} is sold out.|stock=false
We have {quantity} of the {product} left, at {price} euros each.
This {product} by {brand} is made of {material} and costs {price}.
Our {product} has {rating} stars and costs {price} dollars.
New: {product} in {colour}, price {price}, features: {features}.
I bought a {colour} {product} of {brand} for {price}."""),
    _domain("book;novel;book record", "title:title:title,book,name,book title;author:person:author,writer,author name,by;year:year:year,published,publication year,year published;pages:pages:pages,page count,num pages;genre:genre:genre,category;rating:rating:rating,stars;available:bool:available,in library", """
"{title}" was written by {author} in {year}.
{title} by {author} has {pages} pages.
{title} is a {genre} book by {author}.
{author} wrote {title}, published in {year}.
In {year} {author} published the {genre} novel "{title}", which has {pages} pages.
{author}: {title} ({year})
I gave {title} by {author} {rating} stars.
The library has {title} by {author}.|available=true"""),
    _domain("movie;film;show", "title:title:title,movie,name,film;director:person:director,directed by,director name;year:year:year,release year,released;minutes:minutes:duration,minutes,runtime;genre:genre:genre,category;score:score:score,rating;actors:names:actors,cast,starring", """
{title} is a {genre} film by {director} from {year}.
{director} directed {title} in {year}.
The movie {title} takes {minutes} minutes.
{title} ({year}), {minutes} min, directed by {director}
I saw {title}, a {genre} movie, and give it {score} out of 10.
{title} stars {actors}."""),
    _domain("event;meeting;appointment;calendar event;calendar entry", "event:event:event,name,title,event name;date:date:date,day,start date;time:time:time,start time,starts;city:city:city,location,place,venue;guests:names:participants,guests,attendees,people;count:count:attendees,capacity,number of guests,guest count;day:weekday:day,weekday;person:person:organizer,host,with,speaker;free:bool:free,is free", """
The {event} is on {date} at {time} in {city}.
{event} on {day} at {time}
The {event} with {person} starts at {time} on {day}.
On {date} there is a {event} in {city} for {count} people.
{guests} are going to the {event} on {day}.
{person} invites you to the {event} on {date}.
Please add the {event} in {city} on {date} at {time}.
The {event} in {city} is free and begins at {time}.|free=true
Reminder: {event}, {date}, {time}"""),
    _domain("recipe;dish;meal", "dish:dish:name,dish,title,recipe name;ingredients:ingredients;minutes:minutes:minutes,cooking time,duration,time in minutes,cook time;servings:quantity:servings,portions,serves;cuisine:cuisine;level:level:difficulty,level;steps:steps:steps,instructions;vegan:bool:vegan,is vegan,vegetarian", """
For {dish} you need {ingredients}.
{dish} takes {minutes} minutes and serves {servings} people.
To make {dish}, take {ingredients} and cook it for {minutes} minutes.
{dish} is a {level} {cuisine} dish.
{dish} ({cuisine}): {ingredients}. Ready in {minutes} minutes.
This {dish} serves {servings} and needs {ingredients}."""),
    _domain("order;purchase;cart;booking of goods;order confirmation", "customer:person:customer,name,customer name,buyer;product:product:product,item,article;quantity:quantity:quantity,amount,qty,count;price:price:price,total,total price;code:code:order id,order number,id,order;city:city:city,ship to,destination;items:items;date:date:date,order date,delivery date;paid:bool:paid,is paid;address:address:address,shipping address", """
{customer} ordered {quantity} {product} for {price} euros.
Order {code}: {quantity} x {product}, total {price}
I want to order {quantity} pieces of {product}.
{customer} bought a {product} on {date} for ${price}.
Please send {quantity} {product} to {customer} in {city}.
Order {code} by {customer} has been paid.|paid=true
Order {code} from {city} is not paid yet.|paid=false"""),
    _domain("pet;animal;pet profile", "name:first name:name,pet name,called;species:species:species,kind,type,animal;age:small:age,age in years,years;colour:colour:color,colour;owner:person:owner,owner name,belongs to;weight:weight:weight,weight kg;food:food:favorite food,likes,food;vaccinated:bool:vaccinated,is vaccinated", """
{name} is a {colour} {species} and belongs to {owner}.
My {species} is called {name} and is {age} years old.
{owner} has a {species} named {name}.
{name} the {species} weighs {weight} kg and likes {food}.
I have a {colour} {species}, {age} years old, called {name}.
{owner}'s {species} {name} likes {food}.
{name} the {species} has had all shots.|vaccinated=true"""),
    _domain("trip;journey;travel plan;holiday;flight;flight booking", "from:city:from,origin,departure,departure city;to:city:to,destination,arrival,arrival city;date:date:date,departure date,travel date,start date;days:quantity:days,nights,duration days;traveller:person:traveler,passenger,name,passenger name;price:money:price,cost,budget,fare;by:transport:by,transport,vehicle,mode;cities:cities:cities,stops,places", """
I am flying from {from} to {to} on {date}.
{traveller} travels from {from} to {to} for {days} days.
A trip to {to} for {days} days costs {price} euros.
From {from} to {to} by {by}
Book a flight from {from} to {to} for {traveller}.
{traveller} wants to go to {to} by {by} on {date}.
We visit {cities} in {days} days.
{days} nights in {to}, budget {price} dollars."""),
    _domain("task;to-do;reminder;todo item;action item", "task:task:task,title,name,todo;date:date:due date,deadline,due,date;priority:priority:priority,urgency;person:person:assignee,assigned to,owner,person;minutes:minutes:minutes,estimate,duration;done:bool:done,completed,is done;day:weekday:day,due,weekday", """
{person} has to do this by {date}: {task}.
{task} by {day}, priority {priority}
Remind me to do it on {date}: {task}
Task for {person}: {task} (takes {minutes} minutes)
{task}. It is done.|done=true
{task}. It is still open, due {date}.|done=false
{person} does it on {day}: {task}
The priority of "{task}" is {priority}."""),
    _domain("song;track;album;music track", "title:song:title,song,name,track;artist:person:artist,singer,performer,band;year:year:year,released,release year;album:title:album,album name;genre:music:genre,style;minutes:quantity:minutes,length", """
{title} is a {genre} song by {artist} from {year}.
{artist} sings {title} on the album {album}.
Now playing: {title} - {artist}
{artist} released {title} in {year}.
"{title}" by {artist} is {minutes} minutes long."""),
    _domain("city;place;town;destination", "city:city:city,name,place,city name;country:country:country,nation;count:big:population,inhabitants,people;river:river:river;language:language;temperature:temperature:temperature,temp;weather:weather:weather,conditions,condition;capital:bool:is capital,capital", """
{city} lies in {country} and has {count} inhabitants.
{city}, {country}
In {city} it is {weather} and {temperature} degrees.
The weather in {city} is {weather} today.
{city} is in {country}, where people speak {language}.
{city} has {count} people.
{city} is the capital of {country}.|capital=true"""),
    _domain("invoice;receipt;bill;payment;expense", "number:code:invoice number,number,id,invoice id;company:company:vendor,company,seller,from,merchant;customer:person:customer,client,bill to;total:money:total,amount,total amount,amount due;currency:currency:currency,currency code;date:date:date,invoice date,due date;paid:bool:paid,is paid;items:items:items,line items", """
Invoice {number} from {company}: {total} {currency}, due {date}
{customer} paid {total} {currency} to {company} on {date}.|paid=true
Invoice {number} for {customer}, total {total}
{company}, {date}, total: {total} {currency}
Bill {number} of {total} {currency} is not paid.|paid=false
Receipt: {company} {total} {currency}"""),
    _domain("review;product review;rating;customer review", "product:product:product,item,about;stars:rating:rating,stars;person:person:author,reviewer,user,name;sentiment:sentiment;recommended:bool:recommended,would recommend", """
{person}: I love this {product}!|sentiment="positive"|recommended=true
The {product} is great, 5 stars.|sentiment="positive"|stars=5
The {product} broke after a day. Never again!|sentiment="negative"|recommended=false
{person} gave the {product} {stars} stars.
The {product} is okay, nothing special.|sentiment="neutral"
Terrible {product}, I want my money back. {person}|sentiment="negative"|recommended=false
4 stars for the {product}. Works very well, says {person}.|stars=4|sentiment="positive"|recommended=true"""),
    _domain("ticket;support ticket;bug report;issue;support request;incident", "problem:problem:issue,problem,title,summary,description;person:person:reporter,user,customer,name;priority:priority:priority,severity,urgency;number:code:id,ticket id,number;email:email:email,contact;status:status:status,state;department:department:department,team,category;resolved:bool:resolved,is resolved", """
{person} writes: {problem}. Priority {priority}.
Ticket {number}: {problem} (status {status})
Hello, {problem}. Please help me. {person}
{person} ({email}) says that {problem}.
It is {priority}: {problem}. Send it to {department}.
Ticket {number} by {person} has been solved.|resolved=true
{problem}. Assigned to the {department} team, priority {priority}"""),
    _domain("measurement;sensor reading;reading;sensor data", "value:number:value,reading,measurement;unit:unit;room:room:room,location,place,sensor;time:time:time,measured at;temperature:temperature:temperature,temp,celsius;humidity:percent:humidity,humidity percent;battery:percent:battery,battery level", """
The sensor in the {room} shows {value} {unit} at {time}.
It is {temperature} degrees in the {room}.
{room}: {temperature} degrees, humidity {humidity} percent
At {time} the temperature in the {room} was {temperature}.
The length is {value} {unit}.
Sensor {room}, battery {battery}%, temperature {temperature}"""),
    _domain("job;job posting;vacancy;position;job offer", "title:job:title,job,position,role;company:company:company,employer;city:city:city,location;salary:salary:salary,pay,yearly salary;skills:skills:skills,requirements;remote:bool:remote,is remote;years:quantity:years of experience,experience", """
{company} is looking for a {title} in {city}.
{title} at {company}, {salary} euros a year
{company} needs a {title} with {years} years of experience.
A {title} who knows {skills} is wanted in {city}.
Remote job: {title} at {company}.|remote=true"""),
    _domain("restaurant;cafe;table reservation;reservation", "name:title:name,restaurant;city:city:city,location;cuisine:cuisine:cuisine,type,food;guests:quantity:guests,people,party size,seats;time:time:time;date:date:date;person:person:name,guest,reserved by;stars:rating:rating,stars", """
A table for {guests} at {time} on {date}, please. My name is {person}.
{name} in {city} serves {cuisine} food.
{person} reserved a table for {guests} people at {time}.
The {cuisine} restaurant {name} has {stars} stars.
Dinner for {guests} on {date} at {time}"""),
    _domain("student;course;exam result;school report;class", "student:person:student,name,pupil;subject:subject:subject,course,class;grade:score:grade,score,points,mark;teacher:person:teacher,instructor;passed:bool:passed,has passed;day:weekday:day,weekday;time:time", """
{student} got {grade} points in {subject}.
{teacher} teaches {subject} on {day}.
{student} has {subject} with {teacher} at {time}.
{student} passed the {subject} exam with {grade} points.|passed=true
{student} failed {subject}.|passed=false"""),
    _domain("match;game;game result;team", "winner:city:winner,home team,team;loser:city:loser,away team,opponent;goals:small:goals,home score,score;lost:small:away score,goals against;sport:sport:sport,game;date:date:date,played on", """
{winner} beat {loser} {goals} to {lost}.
{winner} won the {sport} game against {loser}.
On {date} {winner} played {sport} against {loser}.
{winner} - {loser} {goals}:{lost}"""),
    _domain("house;apartment;flat;room;listing;hotel", "city:city:city,location;rooms:quantity:rooms,bedrooms,number of rooms;rent:money:rent,price,monthly rent;size:count:size,area,square meters;address:street:address,street;garden:bool:has garden,garden;owner:person:owner,landlord", """
A flat with {rooms} rooms in {city} for {rent} euros.
{address}, {city}: {rooms} rooms, {size} square meters
The house in {city} has {rooms} rooms and a garden.|garden=true
{owner} rents out {size} square meters in {city}.
{rooms} bedrooms, no garden, {rent} a month.|garden=false"""),
    _domain("car;vehicle;used car", "brand:brand:brand,make,manufacturer;colour:colour:color,colour;year:year:year,model year,built;price:money:price;owner:person:owner,seller;plate:code:plate,license plate;electric:bool:electric,is electric", """
A {colour} {brand} from {year} for {price} euros.
{owner} drives a {colour} {brand}.
{brand}, {year}, {colour}, plate {plate}
The electric {brand} costs {price}.|electric=true
{owner} sells a {brand}, built in {year}."""),
    _domain("message;email;letter;mail", "sender:person:sender,from,author;recipient:person:recipient,to,receiver;topic:event:subject,topic,about;date:date:date,sent on;urgent:bool:urgent,is urgent", """
{sender} wrote to {recipient} about the {topic}.
From: {sender}, To: {recipient}, Subject: {topic}
On {date} {recipient} got a mail from {sender}.
{sender} needs an answer from {recipient} about the {topic} at once!|urgent=true
Dear {recipient}, see you at the {topic}. {sender}"""),
]
# fmt: on
