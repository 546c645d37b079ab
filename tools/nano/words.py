"""Vocabulary of the training text."""

ANIMALS = """cat dog fox bear owl rabbit mouse horse cow sheep goat pig duck hen frog toad snake lion tiger
elephant monkey giraffe zebra wolf deer squirrel hedgehog beaver otter seal whale dolphin shark crab turtle
penguin parrot robin swan crow eagle bee ant spider butterfly snail donkey camel kangaroo koala panda bat
mole badger hamster dragon unicorn dinosaur kitten puppy lamb pony goose turkey octopus fish""".split()
FRUITS = (
    "apple banana pear plum cherry grape orange lemon peach mango melon strawberry kiwi fig apricot".split()
)
VEGETABLES = "carrot potato onion tomato pea bean cabbage spinach pumpkin leek garlic pepper".split()
FOODS = (
    """pizza pasta soup bread cheese rice cake chocolate salad porridge pancakes noodles honey toast
sushi curry pie stew popcorn ice-cream""".split()
    + FRUITS
)
COLOURS = (
    "red orange yellow green blue purple pink brown black white grey gold silver violet turquoise".split()
)
THINGS = """lamp chair table book boat kite clock key hat shoe cup spoon box ball bell drum candle train
teapot robot umbrella pencil bicycle wagon button mirror balloon basket ladder lantern violin rocket car
cloud star moon leaf stone river tree flower snowman castle bridge tower window door pillow blanket""".split()
PLACES = """forest garden village valley meadow mountain river island castle farm harbour lake city desert
library lighthouse mill cave hill wood beach orchard market school field""".split()
NAMES = """Ada Alan Alex Alice Amir Amy Ana Anna Anton Ben Bella Bob Carl Carla Chen Chloe Clara Dan David
Diego Dora Ed Elena Eli Ella Emil Emma Eva Finn Frank Fred Gina Grace Hana Hans Harry Henry Hugo Ida Ines Ivan
Jack James Jan Jane Jim Joan Joe John Jonas Julia Kai Karl Kate Kim Kofi Laila Lars Laura Lea Leo Lily Lina
Lisa Lucas Lucy Luis Maria Mark Marta Mary Max Maya Mia Mila Milo Mina Mo Nadia Nick Nina Noah Nora Olga
Oliver Omar Oscar Otto Paul Pedro Peter Pia Pip Priya Ravi Rosa Ruth Sam Sara Sofia Sophie Stella Sven Tara
Theo Tim Tina Tom Tommy Uma Vera Victor Wendy Will Yuki Zara Zoe Ada-Lou Rémi Zoë""".split()
CITIES = """Paris London Berlin Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Cairo Tokyo Delhi Lima
Boston Chicago Toronto Sydney Nairobi Zurich Hamburg Milan Porto Bergen Leeds York""".split()
JOBS = "teacher baker doctor farmer pilot nurse painter writer cook gardener sailor engineer student".split()
HOBBIES = "reading swimming painting singing dancing cooking chess football running fishing sewing gardening".split()
ADJECTIVES = """small big brave shy kind clever old young happy sleepy hungry lonely curious funny quiet gentle
proud lazy busy tiny grumpy merry patient wise polite fearless cheerful tall""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
SEASONS = "spring summer autumn winter".split()
MONTH_SEASONS = dict(
    zip(MONTHS, ["winter"] * 2 + ["spring"] * 3 + ["summer"] * 3 + ["autumn"] * 3 + ["winter"], strict=True)
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
RAINBOW = "red orange yellow green blue indigo violet".split()
CONTINENTS = "Africa Antarctica Asia Australia Europe North-America South-America".split()
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen""".split()
TENS = ". . twenty thirty forty fifty sixty seventy eighty ninety".split()
CAPITALS = dict(
    pair.split(":")
    for pair in """France:Paris Germany:Berlin Italy:Rome Spain:Madrid
Portugal:Lisbon Austria:Vienna Norway:Oslo Sweden:Stockholm Denmark:Copenhagen Finland:Helsinki Ireland:Dublin
Greece:Athens Egypt:Cairo Japan:Tokyo China:Beijing India:Delhi Russia:Moscow Poland:Warsaw Hungary:Budapest
Belgium:Brussels Kenya:Nairobi Peru:Lima Cuba:Havana Canada:Ottawa Australia:Canberra Turkey:Ankara
England:London Scotland:Edinburgh Wales:Cardiff Iceland:Reykjavik Ukraine:Kyiv Chile:Santiago""".split()
)
SOUNDS = dict(
    pair.split(":")
    for pair in """cat:meow dog:woof cow:moo sheep:baa duck:quack pig:oink horse:neigh
hen:cluck frog:croak owl:hoot bee:buzz snake:hiss lion:roar mouse:squeak crow:caw wolf:howl goat:maa
donkey:hee-haw robin:tweet goose:honk""".split()
)
YOUNG = dict(
    pair.split(":")
    for pair in """cat:kitten dog:puppy cow:calf sheep:lamb horse:foal duck:duckling hen:chick
pig:piglet goat:kid bear:cub lion:cub frog:tadpole kangaroo:joey goose:gosling swan:cygnet deer:fawn""".split()
)
LEGS = dict(
    pair.split(":")
    for pair in """cat:4 dog:4 cow:4 horse:4 sheep:4 bird:2 duck:2 hen:2 spider:8 ant:6 bee:6
snake:0 fish:0 human:2 mouse:4 lion:4 elephant:4 butterfly:6 octopus:0 snail:0""".split()
)
OPPOSITES = [
    tuple(pair.split(":"))
    for pair in """hot:cold big:small tall:short fast:slow old:young happy:sad
good:bad light:dark day:night up:down left:right open:closed full:empty hard:soft wet:dry long:short
high:low loud:quiet rich:poor strong:weak near:far early:late clean:dirty thick:thin true:false yes:no
first:last black:white in:out on:off front:back push:pull start:stop win:lose buy:sell love:hate
always:never more:less heavy:light wide:narrow deep:shallow sweet:sour rough:smooth brave:afraid easy:difficult
summer:winter morning:evening north:south east:west above:below inside:outside begin:end give:take
laugh:cry sharp:blunt cheap:expensive awake:asleep alive:dead warm:cool sink:float remember:forget
question:answer friend:enemy safe:dangerous top:bottom before:after""".split()
]
RHYMES = [
    group.split()
    for group in """cat hat bat mat rat|dog fog log frog|moon spoon tune soon|star car far jar
tree bee sea key|house mouse|light night bright kite|day play say way|rain train lane plane|ring sing king thing
book cook look hook|cake lake snake make|ball wall tall fall|bear chair hair pear|sun fun run bun|boat goat coat note
bell well shell tell|rose nose toes|sky fly high pie|bed red head bread""".replace("\n", "|").split("|")
]
COLOUR_OF = dict(
    pair.split(":")
    for pair in """sky:blue grass:green snow:white sun:yellow banana:yellow blood:red
coal:black milk:white lemon:yellow leaf:green strawberry:red night:black carrot:orange tomato:red
chocolate:brown cherry:red sea:blue crow:black elephant:grey frog:green""".split()
)
VERBS = """run walk jump sing dance read write draw cook bake swim climb sleep dream laugh smile cry shout whisper
listen look find lose build break open close carry bring push pull give take buy sell eat drink wash clean paint
play work rest wait watch help teach learn think know remember forget ask answer travel drive ride sail fly fall
grow plant dig cut fold tie throw catch kick hide seek follow lead stay leave arrive return begin finish""".split()
OTHER_WORDS = """water fire earth wind rain snow storm thunder light shadow morning evening night day week month year
hour minute second spring summer autumn winter mother father sister brother friend family child baby king queen
prince princess doctor teacher sailor baker farmer letter word number story song music picture paper school
house home room kitchen garden street road town city country world ocean island mountain valley forest hello
thank please sorry good bad new old long short early late warm cold sweet bitter salty sour soft hard strong weak
yes no maybe always never sometimes often here there now then today tomorrow yesterday because before after
beautiful wonderful important different difficult possible question answer language computer engine memory
keyboard screen window program science history knowledge wisdom courage freedom justice holiday birthday
adventure treasure secret surprise journey promise mistake moment silence noise voice heart hand finger
shoulder knee nose mouth tongue tooth hair skin bone blood breakfast lunch dinner butter sugar salt flour
bottle glass plate knife fork bowl kettle oven fridge sofa carpet curtain ceiling floor wall roof chimney
airplane helicopter submarine motorcycle ambulance hospital restaurant supermarket museum theatre stadium
rhythm quiet quick quiz queue zebra xylophone yellow yogurt jazz jigsaw violet vacuum wizard puzzle pyramid
photograph elephant alphabet dictionary encyclopedia calendar temperature vegetable strength through
although thought enough laughter daughter neighbour eight weight knight knife knee gnome island castle
trio triolet actor channel scope cancel token prompt model cache block stream server request python""".split()
WORDS = sorted(
    {
        *ANIMALS,
        *FRUITS,
        *VEGETABLES,
        *FOODS,
        *COLOURS,
        *THINGS,
        *PLACES,
        *ADJECTIVES,
        *JOBS,
        *HOBBIES,
        *VERBS,
        *OTHER_WORDS,
        *(word for pair in OPPOSITES for word in pair),
        *SEASONS,
    }
)
