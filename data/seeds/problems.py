# ruff: noqa: E501
"""Word problems for the tiny prompts: templates, and `word_problem`, which draws one.

A template draws its variables and yields two texts, the problem and a follow-up question.
`[one|or|other]` marks alternatives, which `Draw.expand` resolves. The order of draws determines
data/seeds/tiny.jsonl: keep it.
"""

from __future__ import annotations

from collections.abc import Iterator

from drawing import Draw

Texts = Iterator[str]


def word_problem(d: Draw) -> tuple[str, str]:
    """Return a problem and a follow-up question; 30 % come from COMPOSED, one in eight gets an
    opener or a closer.
    """
    template = d.pick(*COMPOSED) if d.rng.random() < 0.3 else d.pick(*TEMPLATES)
    # all draws come before the first expansion
    problem, follow_up = (d.expand(text) for text in list(template(d)))
    frame = d.rng.random()
    if frame < 0.06:
        problem = f"{d.pick(*OPENERS)} {problem}"
    elif frame < 0.12:
        problem = f"{problem} {d.pick(*CLOSERS)}"
    return problem, follow_up


def plural(number: int, unit: str) -> str:
    """Return `1 mile` or `3 miles`."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


# fmt: off
OPENERS = (
    "Can you solve this one?", "Here's a puzzle for you.", "A question from my daughter's math class:",
    "I got stuck on this.", "Quick question.",
)
CLOSERS = (
    "Please write down every step.", "Show how you calculate it.", "Go through it slowly.",
    "I'd like to see the calculation.",
)

def event_chain(d: Draw) -> Texts:
    """Apply two to four random events to a quantity."""
    p = d.person()
    thing, place = d.pick(
        ("balloons", "bag"), ("pencils", "drawer"), ("acorns", "basket"), ("buttons", "tin"), ("bricks", "yard"),
        ("tickets", "envelope"), ("chocolates", "box"), ("bulbs", "shed"), ("pebbles", "bucket"), ("badges", "album"),
    )
    events = [
        f"[{p.he} gives {d.n(3, 15)} to {d.person()}|{d.person()} takes {d.n(3, 15)} of them]",
        f"[{p.he} gets {d.n(6, 30)} more|{d.person()} brings {d.n(6, 30)} more]",
        f"{p.he} [buys|finds] {d.n(2, 4)} packs with {d.n(4, 12)} {thing} in each",
        f"[half of what is there gets lost|{p.he} sells half of what {p.he} has]",
        f"{p.he} [doubles|triples] {p.his} stock",
        f"{d.n(2, 4)} friends [come and take|receive] {d.n(2, 5)} each",
    ]
    first, *others = d.sample(events, d.n(2, 4))
    chain = "".join(f". {d.pick('Then', 'After that', 'Next', 'Later', 'The day after')} {event}" for event in others)
    yield f"[There are {2 * d.n(20, 60)} {thing} in {p}'s {place}|{p}'s {place} holds {2 * d.n(20, 60)} {thing}|{p} starts with {2 * d.n(20, 60)} {thing} in a {place}]. [First|One morning] {first}{chain}. [How many {thing} are there in the end|With how many {thing} does {p.he} end up]?"
    yield f"[Start again with|Now begin with] {2 * d.n(20, 60)} {thing}: {first}, and then [a fourth|half] of [them|all {thing}] are thrown away. How many [{thing} |]are left?"

def compare_three(d: Draw) -> Texts:
    """Compare three quantities, each defined by the one before it."""
    a, b, c = d.person(), d.person(), d.person()
    verb, thing = d.pick(
        ("picked", "blueberries"), ("sold", "tickets"), ("wrote", "postcards"), ("planted", "tulips"),
        ("caught", "crabs"), ("washed", "cars"), ("folded", "paper cranes"), ("painted", "eggs"),
        ("delivered", "parcels"), ("scored", "points"),
    )
    relations = [
        f"twice as many {thing} as",
        f"{d.n(3, 12)} fewer {thing} than",
        f"{d.n(5, 25)} more {thing} than",
        f"three times as many {thing} as",
        f"half as many {thing} as",
    ]
    r, s = d.sample(relations, 2)
    ask = d.pick(
        f"How many {thing} was that in total?",
        f"How many was that for {d.pick('the three of them', 'all of them')} together?",
        "What was their average?",
        f"How many more or fewer was that for {c} than for {a}?",
    )
    base = d.n(24, 60, 4)
    yield f"[Last week|In one afternoon|During the holidays|On the weekend], {a} {verb} {base} {thing}. {b} {verb} {r} {a}, and {c} {verb} {s} {b}. {ask}"
    yield f"[And if|What if] {a} had {verb.replace('wrote', 'written')} {base + 12} {thing}, {b} half as many, and {c} {d.n(4, 14)} more than {b}: how many would [it|that] be [in all|together]?"

def basket(d: Draw) -> Texts:
    """Buy goods in a random shop and add a discount, a tax or a payment."""
    p = d.person()
    shop, goods = d.pick(
        ("greengrocer's", ("cabbages", "pineapples", "bunches of carrots", "bags of onions", "mangoes")),
        ("hardware store", ("hammers", "boxes of nails", "rolls of tape", "light bulbs", "brushes")),
        ("pet store", ("collars", "bags of hay", "cans of cat food", "chew bones", "fish nets")),
        ("garden center", ("rose bushes", "flower pots", "packets of seeds", "bags of soil", "spades")),
        ("sports shop", ("tennis balls", "jump ropes", "water bottles", "caps", "pairs of socks")),
        ("bookstore", ("novels", "cookbooks", "maps", "calendars", "bookmarks")),
        ("craft shop", ("sheets of felt", "glue sticks", "tubes of paint", "canvases", "pairs of scissors")),
    )
    x, y, z = d.sample(goods, 3)
    end = d.pick(
        f"{p.He} pays with a $200 bill. What change is {p.he} given?",
        f"A coupon takes ${d.n(3, 9)} off. What is left to pay?",
        f"A tax of {d.pick(5, 10)}% is added. What is the total?",
        f"{p.He} and {d.person()} share the bill equally. What does each pay?",
        "What does the whole purchase cost?",
    )
    yield f"[At the {shop}|In the {shop}], {p} [buys|gets|puts in the cart] {d.n(2, 6)} {x} at ${d.n(2, 9)} [each|apiece], {d.n(1, 5) + 1} {y} at ${d.n(3, 12)} each and {d.n(2, 4)} {z} [that cost ${d.n(2, 8)} each|for ${d.n(2, 8)} each]. {end}"
    yield f"[The next day|A week later] {p} [brings back|returns] {d.n(1, 2) + 1} {x} and buys {d.n(2, 5)} {z} for ${d.n(9, 15)} each. If {p.he} gets ${d.n(2, 9)} back for each of the {x}, how much does {p.he} have to pay?"

def orchard(d: Draw) -> Texts:
    p, trees, each, lost, box = d.person(), d.n(4, 14), d.n(30, 120, 10), d.n(5, 25, 5), d.pick(5, 10)
    fruit = d.pick("apples", "pears", "plums", "oranges", "lemons", "figs")
    yield f"[{p} has an orchard with {trees} trees|There are {trees} trees in {p}'s orchard], and [every tree bears|each of them gives] {each} {fruit}. [A storm ruins|Birds eat|{p} throws away] {lost} of the {fruit} [and the rest are packed into boxes of {box}|, and {p.he} packs the others {box} to a box]. How many boxes [are filled|does {p.he} fill]?"
    yield f"[Next autumn|The following year] the {trees} trees give {each + 20} {fruit} each. [If {p} keeps {lost * 2} of them and sells the others at $2 apiece, what is {p.his} income|{p} eats {lost * 2} of them with {p.his} friends. The rest sell for $2 each. How much money does {p.he} make]?"

def library(d: Draw) -> Texts:
    shelves, per, out, back = d.n(6, 20), d.n(20, 60, 5), d.n(30, 90), d.n(10, 29)
    yield f"A [small|village|school] library has {shelves} shelves [holding|with] {per} books each. On [Monday|Tuesday|Saturday] readers borrow {out} books and bring back {back}. How many books are [on the shelves|in the library] [that evening|at closing time]?"
    yield f"The library buys {d.n(3, 9)} boxes of new books, {d.n(10, 24, 2)} in a box, and [gives away|sells] {d.n(8, 25)} old ones. By how many books does [it|the collection] grow?"

def aquarium(d: Draw) -> Texts:
    p, big, small, k = d.person(), d.n(3, 8), d.n(2, 6), d.n(2, 4)
    fish = d.pick("guppies", "goldfish", "tetras", "catfish")
    yield f"{p} keeps {fish} in {big} [large|glass] tanks and {small} bowls. There are {4 * k} fish in each tank and {k} in each bowl. [Then|One day] {d.n(2, 5)} [friends|cousins] get 2 fish each. How many {fish} [does {p} have then|remain]?"
    yield f"[{p}'s fish eat|The fish need] {d.n(2, 9)} grams of food a day, and a can holds {d.pick(90, 120, 180, 360)} grams. [For how many days do {d.n(2, 4)} cans last|How many days can {p.he} feed them from {d.n(2, 4)} cans]?"

def theater(d: Draw) -> Texts:
    rows, seats, empty, price = d.n(8, 25), d.n(12, 30, 2), d.n(10, 60, 5), d.n(6, 18)
    yield f"The [town|old|open-air] theater has {rows} rows of {seats} seats. At the [premiere|first show|last performance] {empty} seats [stayed empty|were free], and [a ticket cost|each ticket was] ${price}. How much [did the tickets bring in|money was taken for tickets]?"
    yield f"For the [matinee|second show] tickets cost ${price - 2}, and [half of the {rows * seats} seats were taken|{rows * seats // 2} people came]. [The actors|The company] spent ${d.n(50, 200, 10)} on costumes. How much was left of the ticket money?"

def allowance(d: Draw) -> Texts:
    p, week, weeks, spend = d.person(), d.n(5, 20), d.n(4, 12), d.n(8, 18)
    yield f"{p} gets [${week} pocket money|an allowance of ${week}] every week and [saves|puts aside] all of it for {weeks} weeks. [Then {p.he} spends|After that, {p.he} pays] ${spend} [for a present|on a movie|for a book] and finds ${d.n(2, 9)} [in an old jacket|on the street]. How much [money has {p.he} got|does {p.he} own] [now|then]?"
    yield f"[A skateboard costs|The bike that {p} wants is] ${week * (weeks + 6)}. If {p.he} already has ${week * 2} and saves ${week} [a week|each week], how many weeks [must {p.he} wait|does it take until {p.he} can buy it]?"

def bees(d: Draw) -> Texts:
    p, hives, jars, price = d.person(), d.n(4, 15), d.n(6, 20), d.n(4, 11)
    yield f"[A beekeeper named {p}|{p}, a beekeeper,] has {hives} hives. [In June each hive filled|Every hive gave] {jars} jars of honey. {p.He} kept {d.n(3, 12)} jars [for the winter|for {p.his} family] and sold the rest at ${price} [a jar|each]. How much did {p.he} [earn|get]?"
    yield f"Glass jars cost ${d.n(1, 2)} each and labels {d.pick(10, 20, 50)} cents each. What does it cost {p} to [prepare|buy jars and labels for] {hives * 10} jars of honey?"

def marathon(d: Draw) -> Texts:
    p, base, more, days = d.person(), d.n(3, 9), d.n(1, 3), d.n(4, 6)
    yield f"[To get ready for a race, {p} runs|{p} is training for a race and runs] {base} miles on the first day and {plural(more, 'mile')} more [every day than on the day before|on each following day]. How many miles [does {p.he} run|has {p.he} run] in {days} days?"
    yield f"On [race day|Sunday] {p} runs {base * 4} miles in {base * 4 * 9} minutes. At [the same pace|that speed], [how long|how many minutes] would {base * 4 + 5} miles take?"

def eggs(d: Draw) -> Texts:
    p, hens, per, eat = d.person(), d.n(6, 20), d.n(4, 6), d.n(5, 15)
    yield f"[Each of {p}'s {hens} hens lays|{p} has {hens} hens that lay] {per} eggs [every week|a week]. [The family eats|{p} and {p.his} children eat] {eat} eggs [a week|each week], and the other eggs are sold for {d.pick(20, 25, 30, 50)} cents each. How many dollars does {p} [make|earn] in 4 weeks?"
    yield f"A fox takes {d.n(2, 4)} of the {hens} hens. [How many eggs are there in {d.n(3, 8)} weeks if each hen lays {per} a week|If a hen still lays {per} eggs a week, how many eggs do the others lay in {d.n(3, 8)} weeks]?"

def fence(d: Draw) -> Texts:
    p, length, width, price = d.person(), d.n(12, 40, 2), d.n(5, 11), d.n(7, 19)
    yield f"[{p} wants to put a fence around|A fence is to be built around] a [garden|meadow|yard] that is {length} meters long and {width} meters wide. [A gate of 2 meters needs no fence|Two meters are left open for a gate]. [If a meter of fence costs ${price},|One meter of fence is ${price};] what does the fence cost?"
    yield f"[Grass seed|A bag of grass seed] for {d.pick(10, 20, 25)} square meters costs ${d.n(4, 9)}. [How much does seed cost for|What would seed cost for] a lawn of {d.n(4, 12) * 100} square meters?"

def bus(d: Draw) -> Texts:
    start, off, on = d.n(20, 45), d.n(3, 12), d.n(2, 15)
    yield f"[A bus leaves the station with {start} passengers|There are {start} passengers on a bus]. At the first stop {off} [get off|people leave] and {on} get on. At the [next|second] stop [half of the passengers get off|twice as many get on as at the first]. How many [people|passengers] are [on the bus|still riding] [then|now]?"
    yield f"[A ticket for the bus|The fare] is ${d.n(2, 4)} for adults and half of that for children. [How much do|What do] {d.n(12, 30)} adults and {d.n(4, 16, 2)} children pay [together|in all]?"

def pages(d: Draw) -> Texts:
    p, rate, days = d.person(), d.n(12, 30), d.n(3, 7)
    total = rate * days + d.n(60, 150)
    yield f"{p} is reading a [novel|history book|thick detective story] of {total} pages. {p.He} [reads|has read] {rate} pages a day [for {days} days|on each of {days} days]. [After that {p.he} wants to finish it in|The rest is to be read in] 5 days. [About how|How] many pages [a day|per day] is that?"
    yield f"[{p.His} friend|{p}'s brother|{p}'s sister] reads {rate - 4} pages an hour. How many pages [is that in|does that make in] a week with {plural(d.n(1, 3), 'hour')} of reading [a day|every day]?"

def paint(d: Draw) -> Texts:
    p, rooms, walls, minutes = d.person(), d.n(2, 6), d.n(3, 5), d.n(15, 45, 5)
    yield f"[Painting one wall takes {p} {minutes} minutes|{p} needs {minutes} minutes for one wall]. {p.He} has {rooms} rooms to paint with {walls} walls each, and [two of the walls are already done|a friend has already painted 2 walls]. How many [minutes|hours] does {p.he} [need|have to paint]?"
    yield f"A bucket of paint [lasts for|is enough for] {d.n(2, 4)} walls and costs ${d.n(18, 40)}. What does paint for {d.pick(12, 24, 36)} walls cost?"

def stamps(d: Draw) -> Texts:
    p, q, base, k = d.person(), d.person(), d.n(12, 60, 2), d.n(2, 5)
    thing = d.pick("stamps", "coins", "postcards", "trading cards", "sea shells", "marbles")
    yield f"{p} [has collected|owns|has] {base} {thing}. {q} has {k} times as many, and [their friend|{q}'s cousin] {d.person()} has {d.n(3, 11)} fewer than {q}. How many {thing} do [the three of them|all three] have [together|in total]?"
    yield f"{q} [gives|hands] half of {q.his} {base * k} {thing} to {p}, who [loses|has lost] {d.n(2, 10)} of {p.his} own {base}. How many {thing} does {p} [have now|end up with]?"

def gym(d: Draw) -> Texts:
    p, fee, visit, times = d.person(), d.n(20, 50, 5), d.n(3, 8), d.n(6, 14)
    yield f"[The swimming pool|A climbing hall|The gym] [asks|charges] ${fee} a month for members and ${visit} [more for every visit|on top for each visit]. [{p} went there {times} times in [March|May|July]|In [March|May|July], {p} went there {times} times]. How much did {p.he} pay [that month|for the month]?"
    yield f"Without a membership one visit costs ${visit * 3}. How much [would {p} pay for {times} visits|would {times} visits cost {p}], and is that more than ${fee + visit * times}?"

def bakery_orders(d: Draw) -> Texts:
    trays, per, price = d.n(5, 15), d.n(12, 30, 2), d.n(2, 4)
    good = d.pick("muffins", "croissants", "cinnamon rolls", "bagels", "pretzels")
    yield f"[Before sunrise|Every morning] a bakery makes {trays} trays of {good} with {per} on a tray. {d.n(2, 4)} cafes [order|take] {d.n(10, 25)} {good} each, and [the rest are|what remains is] sold in the shop for ${price} apiece. How much does the shop [take for them|make if all are sold]?"
    yield f"On a rainy day only {trays * per // 2} {good} are sold at ${price}, and {d.n(10, 30)} go to [a shelter|the food bank] for free. Flour and butter cost ${d.n(20, 60)}. How much does the bakery earn?"

def school_trip(d: Draw) -> Texts:
    classes, kids, teachers, bus_size = d.n(3, 7), d.n(18, 28), d.n(2, 6), d.pick(30, 40, 45, 50)
    yield f"[{classes} classes of {kids} students and {teachers * classes} teachers|The {classes * kids} students of a school and {teachers * classes} teachers] go [to the zoo|on a trip to a castle|to a museum]. [One bus has|Each bus has] {bus_size} seats. How many buses [are needed|does the school have to hire]?"
    yield f"Entrance is ${d.n(3, 9)} for a student and ${d.n(10, 15)} for a teacher. [What does the school pay for|How much is it for] {kids} students and {teachers} teachers [?|altogether?]"

def rain(d: Draw) -> Texts:
    tank, rate, used, p = d.n(200, 600, 50), d.n(12, 40, 2), d.n(20, 60, 5), d.person()
    yield f"[A rain barrel holds|{p}'s rain barrel holds] {tank} liters [and is a quarter full|, of which a quarter is filled]. [During a storm|When it rains] {rate} liters [run|flow] into it every hour. How many liters are [in it|in the barrel] after {d.n(2, 4)} hours?"
    yield f"[To water|For watering] the vegetables {p} takes {used} liters a day. [In how many days|After how many days] are {used * d.n(4, 9)} liters [gone|used up], and how many liters is that in a week?"

def elevator(d: Draw) -> Texts:
    floor, up, down, p = d.n(5, 12), d.n(4, 15), d.n(2, 8), d.person()
    yield f"{p} gets into the elevator on floor {floor}. [It goes|The elevator goes] up {up} floors, down {down} floors and [then|finally] up {d.n(2, 6)} more. [It needs|It takes] {d.n(2, 5)} seconds for each floor. [How many seconds is {p} in the elevator|For how many seconds does the elevator move]?"
    yield f"Stairs have {d.n(14, 22)} steps between two floors. How many steps does {p} climb from floor 1 to floor {floor}[ , and how many there and back| twice a day]?"

def phone_plan(d: Draw) -> Texts:
    p, base, free, used, rate = d.person(), d.n(10, 30), d.n(100, 300, 50), d.n(320, 500, 20), d.pick(5, 10, 20)
    yield f"[{p}'s phone plan costs ${base} a month and includes|For ${base} a month {p} can talk on the phone for] {free} minutes. [Every further minute|Each minute beyond that] costs {rate} cents. [In April {p.he} talked|Last month {p.he} called] for {used} minutes. [What was|How much was] the bill?"
    yield f"[Another plan|A plan without limits] costs ${base + 15} a month. How much would {p} pay [for it|with it] in a year, and how much [is the|is a] discount of 10%?"

def concert_choir(d: Draw) -> Texts:
    sopranos, k = d.n(8, 20, 2), d.n(2, 3)
    yield f"In [a choir|the choir of the town] there are {sopranos} sopranos, {d.n(3, 8)} more altos than sopranos, and half as many tenors as sopranos. [There are {d.n(4, 9)} basses as well|{d.n(4, 9)} basses sing too]. How many [singers|people] are in the choir?"
    yield f"The {sopranos * k} [members|singers] [each buy a folder for ${d.n(4, 9)}|buy folders for ${d.n(4, 9)} each], and the choir pays ${d.n(40, 90, 5)} for a [hall|piano tuner]. What are all the costs?"

def candles(d: Draw) -> Texts:
    p, wax, per = d.person(), d.n(3, 9), d.n(4, 8)
    yield f"[From one pound of wax {p} can make|{p} knows that one pound of wax is enough for] {per} candles. {p.He} buys {wax} pounds at ${d.n(5, 9)} a pound and wicks for ${d.n(3, 8)}. [All candles are sold|{p.He} sells all the candles] for ${d.n(4, 7)} each. What is {p.his} profit?"
    yield f"A candle burns for {d.n(5, 9)} hours. If {p} lights {d.n(2, 4)} candles at a time, how long do {per * 3} candles last, and how many does {p.he} need for {d.n(30, 60, 5)} hours with one candle at a time?"

def soccer(d: Draw) -> Texts:
    wins, draws_, losses = d.n(6, 15), d.n(2, 8), d.n(2, 7)
    team = d.pick("The Falcons", "The Otters", "The Blue Comets", "The Red Foxes", "The Harbor Kickers")
    yield f"[A win is worth 3 points and a draw 1 point|In the league you get 3 points for a win and 1 for a draw]. {team} [won {wins} games, drew {draws_} and lost {losses}|had {wins} wins, {draws_} draws and {losses} losses]. [They were then fined {d.n(2, 6)} points|The league took {d.n(2, 6)} points from them]. How many points [do they have|are left]?"
    yield f"{team} scored {wins * 3} goals in {wins + draws_ + losses} games; [a third|one third] of them were scored by one player. How many goals did [that player|the others] score?"

def knitting(d: Draw) -> Texts:
    p, balls, hats, scarves = d.person(), d.n(2, 4), d.n(3, 8), d.n(2, 6)
    yield f"{p} [knits|is knitting] for [a fair|the grandchildren|charity]. A hat takes {balls} balls of wool and a scarf {balls + 2}. [How many balls does {p.he} need for {hats} hats and {scarves} scarves|For {hats} hats and {scarves} scarves, how many balls are needed], [and what do they cost at ${d.n(3, 6)} a ball|if {d.n(2, 5)} balls are lying in the drawer already]?"
    yield f"[One row of a sweater has|A sweater has rows of] {d.n(60, 120, 10)} stitches, and {p} makes {d.n(20, 40, 5)} stitches a minute. How many stitches are in {d.n(10, 40, 5)} rows[?| , and how many does {p.he} make in an hour?]"

def pizza(d: Draw) -> Texts:
    people, slices, pizzas, p = d.n(5, 12), d.n(2, 4), d.n(4, 9), d.person()
    yield f"[At {p}'s birthday|For a movie night at {p}'s place] {pizzas} pizzas are cut into 8 slices each. [{people} guests eat {slices} slices each|Each of the {people} guests eats {slices} slices] and {p} eats {d.n(2, 5)}. [What is left|How many slices are left] [for the next day|in the boxes]?"
    yield f"[A pizza costs|They pay for each pizza] ${d.n(9, 14)}. Delivery is ${d.n(3, 6)}, and a tip of ${d.n(4, 8)} is added. What does each of {pizzas} people pay for {pizzas * 2} pizzas [if they share the cost|when they split it evenly]?"

def rope(d: Draw) -> Texts:
    p, parts, each, rest = d.person(), d.n(4, 12), d.n(15, 60, 5), d.n(10, 90, 5)
    yield f"{p} cuts {parts} pieces of {each} centimeters from a [rope|ribbon|wire], and {rest} centimeters [are left|remain]. [How long was|What was the length of] the [whole|uncut] piece? [Give the answer in centimeters.|]"
    yield f"[Another one|A second one] is {parts * each * 2} centimeters long. How many pieces of {each * 2} centimeters can {p} [cut from it|make of it], and how many cuts does {p.he} need?"

def salary(d: Draw) -> Texts:
    p, pay, rent, food = d.person(), d.n(1800, 4200, 100), d.n(600, 1100, 50), d.n(200, 450, 25)
    yield f"[{p} earns|{p}'s job pays {p.him}] ${pay} a month. [Out of this {p.he} pays|{p.He} spends] ${rent} for [the apartment|rent], ${food} for food and half as much for [transport|clothes] as for food. [The rest is saved|{p.He} saves what remains]. How much does {p.he} save in [half a year|a year|{d.n(3, 5)} months]?"
    yield f"[{p} gets a raise of {d.pick(5, 10)}%|{p}'s boss raises the pay by {d.pick(5, 10)}%] [from|on] ${pay}. [How much more is that|How many more dollars is that] in a year?"

def ages(d: Draw) -> Texts:
    p, q, r = d.person(), d.person(), d.person()
    age, k, diff, years = d.n(6, 15), d.n(2, 4), d.n(2, 6), d.n(4, 12)
    yield f"{p} is {age} years old. [{p.His} mother|{p.His} father|{p.His} aunt] is {k + 1} times as old, and {p.his} [cousin|friend|neighbor] {q} is {diff} years [older|younger] than {p}. [What is the sum of their ages|How old will the three be together in {years} years]?"
    yield f"{r} is twice as old as {q} [was {diff} years ago|will be in {diff} years], and {q} is {age + diff} now. How old is {r}?"

def printer(d: Draw) -> Texts:
    rate, copies, sheets, pack = d.n(12, 40, 2), d.n(20, 60, 10), d.n(4, 18, 2), d.pick(100, 250, 500)
    yield f"[An office printer makes|The printer in the office makes] {rate} pages a minute. {d.person()} [wants|needs] {copies} copies of a report of {sheets} pages, and {d.n(1, 3) * rate} pages [come out spoiled|have to be printed again]. How many minutes does the printer run?"
    yield f"Paper [is sold|comes] in packs of {pack} sheets for ${d.n(4, 9)}. [The office uses {pack // 50 * 20} sheets a day|Every day {pack // 50 * 20} sheets are used]. What does paper for {d.n(5, 20, 5)} days cost?"

def greenhouse(d: Draw) -> Texts:
    p, rows, plants = d.person(), d.n(5, 15), d.n(8, 24, 2)
    crop = d.pick("tomato plants", "pepper plants", "cucumbers", "lettuces", "strawberry plants")
    yield f"In {p}'s greenhouse {rows} rows of {plants} {crop} [grow|are growing]. [A quarter|Half] of the plants [dry out|fall ill], and {p} [plants|adds] {d.n(10, 40, 5)} new ones. How many plants are [there|in the greenhouse] [now|after that]?"
    yield f"[Each plant|Every plant] [yields|bears] {d.n(2, 5)} kilograms, and a kilogram sells for ${d.n(2, 4)}. What do {rows * 4} plants bring in [if {p} pays ${d.n(20, 80, 10)} for water|after ${d.n(20, 80, 10)} for fertilizer is subtracted]?"

def tutor(d: Draw) -> Texts:
    p, price, kids, weeks = d.person(), d.n(15, 40), d.n(2, 6), d.n(4, 10)
    lesson = d.pick("piano", "guitar", "Spanish", "chess", "math", "drawing")
    yield f"{p} gives {lesson} lessons [for|at] ${price} [an hour|each]. [{p.He} has {kids} students who come twice a week|Twice a week {kids} students come to {p.him}]. [In {weeks} weeks|Over {weeks} weeks], {d.n(2, 6)} lessons were canceled [and not paid|]. How much did {p.he} earn?"
    yield f"[A friend buys|One can also buy] {d.pick(10, 12)} {lesson} lessons at once for ${price * 9}. How much [cheaper is that than|does one save compared with] paying ${price} for each?"

def recycling(d: Draw) -> Texts:
    p, q = d.person(), d.person()
    cans, bottles, cent = d.n(40, 120, 10), d.n(20, 80, 10), d.pick(5, 10)
    yield f"[For a recycling drive|To help the park], {p} collects {cans} cans and {bottles} bottles, and {q} collects half as many cans but twice as many bottles. [Each piece|Every can and bottle] is worth {cent} cents. How many dollars do they [get|raise] together?"
    yield f"[The class|Their class] collected {cans * 5} cans in [a month|four weeks], {d.n(20, 80, 10)} of them in the first week, and [as many|the same number] in each of the other 3 weeks. About how many was that [a week|per week]?"

def camping(d: Draw) -> Texts:
    tents, per, cabins = d.n(4, 12), d.n(2, 4), d.n(3, 8)
    yield f"[At a summer camp|In a camp by the lake] {tents} tents hold {per} children each and {cabins} cabins hold {per * 2} each. [All beds are full|Every place is taken], and there is one leader for every {per} children. How many leaders are there?"
    yield f"[The camp cook needs|Cooking takes] {d.n(2, 5)} pounds of potatoes for {d.n(4, 6)} children. [How many pounds are cooked|How many pounds is that] for {d.pick(60, 120, 180)} children [over|in] {d.n(2, 5)} days?"

def taxi(d: Draw) -> Texts:
    p, start, rate, miles = d.person(), d.n(3, 6), d.n(2, 4), d.n(5, 18)
    yield f"[A taxi in this city costs|For a taxi you pay] ${start} to start and ${rate} [a mile|for each mile]. {p} rides {miles} miles [to the airport|to the hospital|to a wedding] and [gives|adds] a tip of ${d.n(2, 6)}. [On the way back|Going home] {p.he} takes the train for ${d.n(3, 9)}. What does {p.he} spend?"
    yield f"[The driver|A taxi driver] has {d.n(8, 16)} rides [a day|on a normal day] of {d.n(3, 7)} miles each. At ${start} plus ${rate} a mile, what [does he|does she] take in [a day|on such a day]?"

def cookies(d: Draw) -> Texts:
    p, q, n_, each = d.person(), d.person(), d.n(3, 8), d.n(12, 24, 2)
    yield f"{p} bakes {n_} batches of {each} cookies [for the neighbors|for a school party|with {p.his} children]. [{q} from next door eats|Hungry {q} eats] {d.n(3, 9)}, {d.n(4, 10)} burn, and [the others|all others] are put in bags of {d.pick(4, 6, 8)}. How many [full bags|bags] [does {p.he} get|are there]?"
    yield f"[One batch needs|For one batch you need] {d.n(2, 3)} cups of sugar and {d.n(2, 4)} [eggs|spoons of butter]. [How many cups of sugar are in|How much sugar is needed for] {n_ * 2} batches[ if a third of the sugar is left out|]?"

def parking(d: Draw) -> Texts:
    floors, spots, cars = d.n(3, 8), d.n(30, 80, 5), d.n(15, 60)
    yield f"A [parking garage|car park] has {floors} floors with {spots} spaces [on each|each]. [At noon|In the afternoon], {cars} spaces are free. [In the next hour|Until six] {d.n(5, 14)} cars [drive in|come] and {d.n(20, 60, 5)} [leave|drive away]. How many cars are [parked there|in it] then?"
    yield f"[Parking|A space] costs ${d.n(2, 4)} for the first hour and ${d.n(1, 2)} for each further hour. What do {d.n(10, 40, 5)} cars pay [that stay|if each of them stays] {d.n(3, 7)} hours?"

def toys(d: Draw) -> Texts:
    a, b, c = d.sample(["cars", "dolls", "trains", "puzzles", "kites", "robots", "teddy bears", "board games"], 3)
    x, y, z = d.n(4, 9), d.n(10, 19), d.n(20, 35)
    shop = d.pick("A toy shop", "The shop on the corner", "An online toy store", "A toy seller at the market")
    yield f"{shop} sells {a} for ${x}, {b} for ${y} and {c} for ${z}. [In one day|On Saturday|Before the holidays] it sells {d.n(5, 20)} {a}, {d.n(3, 12)} {b} and {d.n(2, 9)} {c}. [What does it take in|How many dollars is that]?"
    yield f"[The price of the {c} falls|All {c} become cheaper] from ${z * 2} to ${z}, and now {d.n(3, 5)} times as many [are sold|of them are sold] as the {d.n(4, 10)} [a day|a week] before. [How much money is that now|What is the new income from {c}]?"

def garden_beds(d: Draw) -> Texts:
    p, side, deep = d.person(), d.n(2, 5), d.pick(2, 3)
    yield f"{p} builds {d.n(2, 6)} [raised beds|sand boxes], each {side + 2} feet long, {side} feet wide and {deep} feet deep. [Soil comes|Sand comes] in bags of {d.pick(2, 3)} cubic feet [for|at] ${d.n(4, 8)}. How many bags does {p.he} need[?| , and what do they cost?]"
    yield f"Along the edge of a bed of {side + 2} by {side} feet {p} [sets|plants] a flower every foot. [How many flowers are that|How many flowers does {p.he} need] for {d.n(2, 6)} beds?"

def streaming(d: Draw) -> Texts:
    p, episodes, minutes, seasons = d.person(), d.n(8, 16), d.n(25, 55, 5), d.n(2, 6)
    yield f"A [series|show] has {seasons} seasons of {episodes} episodes, and [an episode lasts {minutes} minutes|every episode is {minutes} minutes long]. {p} has [seen|watched] the first season and {d.n(2, 7)} episodes of the second. How many minutes [are still to be watched|has {p.he} still got to watch]?"
    yield f"If {p} watches {d.n(2, 4)} episodes [a night|every evening], [how many nights does {p.he} need for {episodes * 6} episodes|after how many days has {p.he} seen {episodes * 6} of them]?"

def water(d: Draw) -> Texts:
    big, rate_in, rate_out = d.n(600, 2400, 120), d.n(20, 40, 4), d.n(4, 12, 4)
    yield f"[A pool holds|The pool of a hotel holds|A water tank holds] {big} gallons. [A hose fills|A pump fills] it with {rate_in} gallons a minute, [but|while] {rate_out} gallons a minute [leak out|run off]. [It is half full already.|At first it is empty.] How long does it take [until it is full|to fill it]?"
    yield f"Water costs ${d.n(2, 6)} for every 100 gallons. What does it cost to fill {d.n(2, 5)} tanks of {big // 100 * 100} gallons[ if a fifth of each is rain water|]?"

def votes(d: Draw) -> Texts:
    a, b, c = d.person(), d.person(), d.person()
    total, share = d.n(200, 800, 100), d.pick(20, 25, 30, 40, 50)
    yield f"[In the school election|In the vote for mayor|When the club chose a president], {total} [people voted|votes were counted]. {a} got {share}% of the votes, {b} {d.n(20, 60, 5)} [votes|] less than {a}, and {c} [got the rest|all the others]. How many votes did {c} get?"
    yield f"[Two years later|The next time] {total + 100} people vote, and {a} gets {share + 10}%. [How many votes more or fewer is that|By how many votes does {a.his} result change] compared with {total * share // 100}?"

def farm_animals(d: Draw) -> Texts:
    p, cows, k = d.person(), d.n(6, 20), d.n(2, 5)
    a, b = d.sample(["sheep", "goats", "pigs", "ducks", "geese"], 2)
    yield f"[On {p}'s farm there are|{p} keeps] {cows} cows, {k} times as many {a} as cows, and {d.n(4, 15)} {b}. [{p.He} sells|Then {p.he} sells] {d.pick('a third', 'half', 'a quarter')} of the {a} [and buys|but gets] {d.n(3, 9)} more {b}. How many animals [live on the farm|does {p.he} have] then?"
    yield f"[A cow gives|Each cow gives] {d.n(15, 28)} liters of milk a day. [{p} sells|The dairy buys] the milk of {cows} cows for {d.pick(40, 50, 60)} cents a liter. [How much is that|What does {p.he} get] for {d.n(3, 10)} days?"

def trains_meet(d: Draw) -> Texts:
    v, w, t = d.n(40, 70, 5), d.n(50, 90, 5), d.n(2, 5)
    a, b = d.sample(["Aldport", "Brixham", "Corvale", "Dunmore", "Elmstead", "Fairlee"], 2)
    yield f"[Two trains start at the same time|At eight o'clock two trains start], one from {a} at {v} miles per hour and one from {b} at {w} miles per hour, [toward each other|on parallel tracks toward each other]. They [meet|pass each other] after {t} hours. How far is {a} from {b}?"
    yield f"[The train from {a}|One of the trains] is late and goes only {v - 10} miles per hour. How many miles fewer does it cover in {t} hours[?| than at {v}?]"

def puzzle(d: Draw) -> Texts:
    p, q, pieces, rate = d.person(), d.person(), d.n(500, 1500, 100), d.n(20, 50, 5)
    yield f"{p} and {q} [are doing|work on] a jigsaw puzzle of {pieces} pieces. {p} places {rate} pieces an hour and {q} {rate // 5} [fewer|more]. [After {d.n(2, 6)} hours|When they stop after {d.n(2, 6)} hours], how many pieces [are missing|still lie on the table]?"
    yield f"Alone, {q} places {rate} pieces an hour and works {d.n(2, 4)} hours [a day|every evening] on a puzzle of {rate * 24} pieces. How many days [does it take|is {q.he} busy]?"

def discount_books(d: Draw) -> Texts:
    p, price, count, off = d.person(), d.n(8, 30, 2), d.n(3, 9), d.pick(10, 20, 25, 50)
    item = d.pick("books", "T-shirts", "plants", "video games", "mugs", "posters")
    yield f"[{p} buys {count} {item} that normally cost ${price} each|The normal price of {count} {item} in {p}'s basket is ${price} each]. [There is a sale with {off}% off|Today everything is {off}% cheaper], and [shipping|postage] [is|costs] ${d.n(3, 8)}. [What does {p} pay|What is the total price]?"
    yield f"[Without the sale|At the full price of ${price}], how many {item} could {p} buy [with|for] ${price * d.n(4, 9) + d.n(1, price - 1)}, and what would be left?"

def commute(d: Draw) -> Texts:
    p, walk, ride, days = d.person(), d.n(5, 15), d.n(15, 45, 5), d.n(3, 5)
    yield f"[On the way to work|Every morning] {p} walks {walk} minutes to the [station|bus stop], waits {d.n(3, 9)} minutes and rides for {ride} minutes. [The way home takes|Going back takes {p.him}] {d.n(5, 15)} minutes longer. How many minutes does {p.he} travel in a week of {days} working days?"
    yield f"[A monthly ticket costs|{p} could buy a monthly ticket for] ${d.n(50, 90, 5)} [and|, while] a single ride [costs|is] ${d.n(2, 4)}. [What is cheaper for {d.n(14, 22)} working days with two rides a day, and by how much|How much would two rides a day on {d.n(14, 22)} days cost]?"

def photo(d: Draw) -> Texts:
    p, taken, per = d.person(), d.n(120, 400, 20), d.pick(4, 6, 8)
    yield f"{p} took {taken} photos [on vacation|at a wedding|in the mountains]. {p.He} deleted {d.n(20, 90, 5)} [blurry ones|of them] and printed half of the others. [An album page holds|On a page of the album there is room for] {per} photos. How many pages [does {p.he} fill|are needed]?"
    yield f"[One print costs|A print is] {d.pick(15, 20, 25, 30)} cents, and the album ${d.n(9, 25)}. [How much do|What do] {per * 20} prints and {d.n(2, 3)} albums [cost|cost in all]?"

def charity_run(d: Draw) -> Texts:
    p, laps, rate, sponsors = d.person(), d.n(8, 30), d.n(1, 4), d.n(3, 9)
    yield f"{p} runs {laps} laps in a charity run. [{sponsors} sponsors pay|From each of {sponsors} sponsors {p.he} gets] ${rate} for every lap, and {p.his} [grandfather|teacher|boss] [adds|gives] ${d.n(10, 50, 5)} [on top|no matter how many]. How much does {p} [raise|collect]?"
    yield f"[A lap is {d.pick(200, 250, 400)} meters long|One lap measures {d.pick(200, 250, 400)} meters]. How many kilometers are {d.pick(20, 40, 60)} laps, and how many laps [are|make] {d.n(2, 6)} kilometers?"

def workshop_chairs(d: Draw) -> Texts:
    p, chairs, tables = d.person(), d.n(6, 20), d.n(2, 6)
    yield f"[A carpenter, {p},|{p} is a carpenter and] makes {chairs} chairs and {tables} tables in a month. [For a chair {p.he} uses|A chair takes] {d.n(2, 4)} boards and [for a table|a table takes] {d.n(6, 10)}. [One board costs ${d.n(3, 9)}|Boards are ${d.n(3, 9)} each]. How much does the wood cost?"
    yield f"{p} sells a chair for ${d.n(45, 95, 5)} and a table for ${d.n(150, 320, 10)}. [What does {p.he} get|How much money is it] for {d.n(4, 8)} chairs and {plural(d.n(1, 3), 'table')}[ if {d.pick(5, 10)}% goes to the shop|]?"

def medicine(d: Draw) -> Texts:
    p, per_day, days, box = d.person(), d.n(2, 4), d.n(10, 30, 5), d.pick(12, 20, 24, 30)
    yield f"[The doctor tells {p} to take|{p} has to take] {per_day} tablets a day for {days} days [and then one a day for {d.n(5, 14)} days|, and after that one a day for another {d.n(5, 14)}]. [They come|The tablets come] in boxes of {box}. How many boxes [must {p.he} get|are necessary]?"
    yield f"A box of {box} tablets costs ${box * d.pick(1, 2) // 2}, and the insurance pays {d.pick(50, 75, 80)}% [of it|of the price]. [What does {p} pay|How much is left to pay] for {d.n(2, 8)} boxes?"

def battery(d: Draw) -> Texts:
    p, drop, hours = d.person(), d.n(6, 15), d.n(3, 6)
    device = d.pick("laptop", "tablet", "phone", "camera drone", "electric bike")
    yield f"The battery of {p}'s {device} is [full at nine o'clock|at 100% in the morning]. [It loses {drop}% an hour|Every hour it loses {drop}%] while {p.he} uses it. {p.He} uses it for {hours} hours [, then|and then] charges it for half an hour, [which adds|adding] {d.n(8, 20)}%. How full is the battery then?"
    yield f"[Charging|A charger] adds {d.n(1, 2)}% in a minute. How many minutes does it take from {d.n(10, 40, 2)}% to {d.n(80, 100, 2)}%[?| , and how many hours are 3 such charges?]"

def bricks(d: Draw) -> Texts:
    p, courses, per, rate = d.person(), d.n(8, 24), d.n(20, 60, 4), d.n(40, 90, 10)
    yield f"A wall [has|is to have] {courses} rows of {per} bricks. {p} [lays|can lay] {rate} bricks an hour and [has worked for|works] {d.n(2, 5)} hours. How many bricks [are still to be laid|does {p.he} still have to lay]?"
    yield f"[Bricks are delivered|They come] on pallets of {d.pick(200, 250, 300)} [for|at] ${d.n(90, 180, 10)}. [How many pallets|How many of them] must {p} order for {courses * 100} bricks, and what is the price?"

def tournament(d: Draw) -> Texts:
    teams, players, fee = d.n(6, 16, 2), d.n(5, 11), d.n(5, 15)
    sport = d.pick("volleyball", "basketball", "handball", "table tennis", "hockey")
    yield f"{teams} teams of {players} [players|people] [take part|play] in a {sport} tournament. [Every player pays|The fee per player is] ${fee}. [The winners get a prize of|The first prize is worth] ${d.n(100, 250, 10)} [and|, and] the hall costs ${d.n(60, 140, 10)}. How much money [is left over|remains]?"
    yield f"[If each team plays every other team once, how|Every team plays each of the others once. How] many games [are played|is that] with {teams} teams, and how many [hours|minutes] do they take at {d.pick(20, 30, 40)} minutes a game?"

def ice_cream(d: Draw) -> Texts:
    small, large, cost, p = d.n(2, 3), d.n(4, 6), d.n(40, 120, 10), d.person()
    yield f"{p} sells ice cream [at the beach|in the park] for ${small} a [small cone|scoop] and ${large} [a large cup|a large one]. [On a hot day|On Sunday] {p.he} sells {d.n(30, 80, 5)} of the small and {d.n(15, 50, 5)} of the large ones. [Ingredients cost ${cost}|{p.He} has paid ${cost} for the ingredients]. What is [left|{p.his} gain]?"
    yield f"[A tub holds|One tub is enough for] {d.n(30, 60, 5)} scoops. If {p} sells {d.n(100, 240, 20)} scoops a day, how many tubs does {p.he} need for {d.n(3, 7)} days?"

# each composes as many problems as several templates
COMPOSED = (event_chain, compare_three, basket)
TEMPLATES = (
    orchard, library, aquarium, theater, allowance, bees, marathon, eggs, fence, bus, pages, paint, stamps, gym,
    bakery_orders, school_trip, rain, elevator, phone_plan, concert_choir, candles, soccer, knitting, pizza, rope,
    salary, ages, printer, greenhouse, tutor, recycling, camping, taxi, cookies, parking, toys, garden_beds,
    streaming, water, votes, farm_animals, trains_meet, puzzle, discount_books, commute, photo, charity_run,
    workshop_chairs, medicine, battery, bricks, tournament, ice_cream,
)
