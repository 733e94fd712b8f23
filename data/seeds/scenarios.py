# ruff: noqa: E501  (a wording is one line of text)
"""Scenarios of word problems, first part: the farm, the town, the house, money and ages.

Every scenario takes a `Draw` and returns (problem, follow-up) as texts with `[one|or|other]` wordings still
open. Knows nothing of conversations, files or code requests.
"""

from __future__ import annotations

from drawing import Draw, count


def orchard(d: Draw) -> tuple[str, str]:
    p, trees, each, lost, box = d.person(), d.n(4, 14), d.n(30, 120, 10), d.n(5, 25, 5), d.pick(5, 10)
    fruit = d.pick("apples", "pears", "plums", "oranges", "lemons", "figs")
    return (
        f"[{p} has an orchard with {trees} trees|There are {trees} trees in {p}'s orchard], and [every tree bears|each of "
        f"them gives] {each} {fruit}. [A storm ruins|Birds eat|{p} throws away] {lost} of the {fruit} [and the rest are "
        f"packed into boxes of {box}|, and {p.he} packs the others {box} to a box]. How many boxes [are filled|does {p.he} fill]?",
        f"[Next autumn|The following year] the {trees} trees give {each + 20} {fruit} each. [If {p} keeps {lost * 2} of "
        f"them and sells the others at $2 apiece, what is {p.his} income|{p} eats {lost * 2} of them with {p.his} friends. The rest sell for $2 each. How much money does {p.he} make]?",
    )


def library(d: Draw) -> tuple[str, str]:
    shelves, per, out, back = d.n(6, 20), d.n(20, 60, 5), d.n(30, 90), d.n(10, 29)
    return (
        f"A [small|village|school] library has {shelves} shelves [holding|with] {per} books each. On [Monday|Tuesday|Saturday] "
        f"readers borrow {out} books and bring back {back}. How many books are [on the shelves|in the library] [that evening|at closing time]?",
        f"The library buys {d.n(3, 9)} boxes of new books, {d.n(10, 24, 2)} in a box, and [gives away|sells] {d.n(8, 25)} old ones. "
        f"By how many books does [it|the collection] grow?",
    )


def aquarium(d: Draw) -> tuple[str, str]:
    p, big, small, k = d.person(), d.n(3, 8), d.n(2, 6), d.n(2, 4)
    fish = d.pick("guppies", "goldfish", "tetras", "catfish")
    return (
        f"{p} keeps {fish} in {big} [large|glass] tanks and {small} bowls. There are {4 * k} fish in each tank and {k} in each bowl. "
        f"[Then|One day] {d.n(2, 5)} [friends|cousins] get 2 fish each. How many {fish} [does {p} have then|remain]?",
        f"[{p}'s fish eat|The fish need] {d.n(2, 9)} grams of food a day, and a can holds {d.pick(90, 120, 180, 360)} grams. "
        f"[For how many days do {d.n(2, 4)} cans last|How many days can {p.he} feed them from {d.n(2, 4)} cans]?",
    )


def theater(d: Draw) -> tuple[str, str]:
    rows, seats, empty, price = d.n(8, 25), d.n(12, 30, 2), d.n(10, 60, 5), d.n(6, 18)
    return (
        f"The [town|old|open-air] theater has {rows} rows of {seats} seats. At the [premiere|first show|last performance] {empty} seats "
        f"[stayed empty|were free], and [a ticket cost|each ticket was] ${price}. How much [did the tickets bring in|money was taken for tickets]?",
        f"For the [matinee|second show] tickets cost ${price - 2}, and [half of the {rows * seats} seats were taken|"
        f"{rows * seats // 2} people came]. [The actors|The company] spent ${d.n(50, 200, 10)} on costumes. How much was left of the ticket money?",
    )


def allowance(d: Draw) -> tuple[str, str]:
    p, week, weeks, spend = d.person(), d.n(5, 20), d.n(4, 12), d.n(8, 18)
    return (
        f"{p} gets [${week} pocket money|an allowance of ${week}] every week and [saves|puts aside] all of it for {weeks} weeks. "
        f"[Then {p.he} spends|After that, {p.he} pays] ${spend} [for a present|on a movie|for a book] and finds ${d.n(2, 9)} [in an old jacket|on the street]. "
        f"How much [money has {p.he} got|does {p.he} own] [now|then]?",
        f"[A skateboard costs|The bike that {p} wants is] ${week * (weeks + 6)}. If {p.he} already has ${week * 2} and saves ${week} [a week|each week], "
        f"how many weeks [must {p.he} wait|does it take until {p.he} can buy it]?",
    )


def bees(d: Draw) -> tuple[str, str]:
    p, hives, jars, price = d.person(), d.n(4, 15), d.n(6, 20), d.n(4, 11)
    return (
        f"[A beekeeper named {p}|{p}, a beekeeper,] has {hives} hives. [In June each hive filled|Every hive gave] {jars} jars of honey. "
        f"{p.He} kept {d.n(3, 12)} jars [for the winter|for {p.his} family] and sold the rest at ${price} [a jar|each]. How much did {p.he} [earn|get]?",
        f"Glass jars cost ${d.n(1, 2)} each and labels {d.pick(10, 20, 50)} cents each. What does it cost {p} to [prepare|buy jars and labels for] {hives * 10} jars of honey?",
    )


def marathon(d: Draw) -> tuple[str, str]:
    p, base, more, days = d.person(), d.n(3, 9), d.n(1, 3), d.n(4, 6)
    return (
        f"[To get ready for a race, {p} runs|{p} is training for a race and runs] {base} miles on the first day and {count(more, 'mile')} "
        f"more [every day than on the day before|on each following day]. How many miles [does {p.he} run|has {p.he} run] in {days} days?",
        f"On [race day|Sunday] {p} runs {base * 4} miles in {base * 4 * 9} minutes. At [the same pace|that speed], [how long|how many minutes] would "
        f"{base * 4 + 5} miles take?",
    )


def eggs(d: Draw) -> tuple[str, str]:
    p, hens, per, eat = d.person(), d.n(6, 20), d.n(4, 6), d.n(5, 15)
    return (
        f"[Each of {p}'s {hens} hens lays|{p} has {hens} hens that lay] {per} eggs [every week|a week]. [The family eats|{p} and {p.his} children eat] {eat} "
        f"eggs [a week|each week], and the other eggs are sold for {d.pick(20, 25, 30, 50)} cents each. How many dollars does {p} [make|earn] in 4 weeks?",
        f"A fox takes {d.n(2, 4)} of the {hens} hens. [How many eggs are there in {d.n(3, 8)} weeks if each hen lays {per} a week|If a hen still lays {per} eggs a week, how many eggs do the others lay in {d.n(3, 8)} weeks]?",
    )


def fence(d: Draw) -> tuple[str, str]:
    p, length, width, price = d.person(), d.n(12, 40, 2), d.n(5, 11), d.n(7, 19)
    return (
        f"[{p} wants to put a fence around|A fence is to be built around] a [garden|meadow|yard] that is {length} meters long and {width} meters wide. "
        f"[A gate of 2 meters needs no fence|Two meters are left open for a gate]. [If a meter of fence costs ${price},|One meter of fence is ${price};] what does the fence cost?",
        f"[Grass seed|A bag of grass seed] for {d.pick(10, 20, 25)} square meters costs ${d.n(4, 9)}. [How much does seed cost for|What would seed cost for] a lawn of {d.n(4, 12) * 100} square meters?",
    )


def bus(d: Draw) -> tuple[str, str]:
    start, off, on = d.n(20, 45), d.n(3, 12), d.n(2, 15)
    return (
        f"[A bus leaves the station with {start} passengers|There are {start} passengers on a bus]. At the first stop {off} [get off|people leave] and {on} get on. "
        f"At the [next|second] stop [half of the passengers get off|twice as many get on as at the first]. How many [people|passengers] are [on the bus|still riding] [then|now]?",
        f"[A ticket for the bus|The fare] is ${d.n(2, 4)} for adults and half of that for children. [How much do|What do] {d.n(12, 30)} adults and {d.n(4, 16, 2)} children pay [together|in all]?",
    )


def pages(d: Draw) -> tuple[str, str]:
    p, rate, days = d.person(), d.n(12, 30), d.n(3, 7)
    total = rate * days + d.n(60, 150)
    return (
        f"{p} is reading a [novel|history book|thick detective story] of {total} pages. {p.He} [reads|has read] {rate} pages a day [for {days} days|on each of {days} days]. "
        f"[After that {p.he} wants to finish it in|The rest is to be read in] 5 days. [About how|How] many pages [a day|per day] is that?",
        f"[{p.His} friend|{p}'s brother|{p}'s sister] reads {rate - 4} pages an hour. How many pages [is that in|does that make in] a week with {count(d.n(1, 3), 'hour')} of reading [a day|every day]?",
    )


def paint(d: Draw) -> tuple[str, str]:
    p, rooms, walls, minutes = d.person(), d.n(2, 6), d.n(3, 5), d.n(15, 45, 5)
    return (
        f"[Painting one wall takes {p} {minutes} minutes|{p} needs {minutes} minutes for one wall]. {p.He} has {rooms} rooms to paint with {walls} walls each, and "
        f"[two of the walls are already done|a friend has already painted 2 walls]. How many [minutes|hours] does {p.he} [need|have to paint]?",
        f"A bucket of paint [lasts for|is enough for] {d.n(2, 4)} walls and costs ${d.n(18, 40)}. What does paint for {d.pick(12, 24, 36)} walls cost?",
    )


def stamps(d: Draw) -> tuple[str, str]:
    p, q, base, k = d.person(), d.person(), d.n(12, 60, 2), d.n(2, 5)
    thing = d.pick("stamps", "coins", "postcards", "trading cards", "sea shells", "marbles")
    return (
        f"{p} [has collected|owns|has] {base} {thing}. {q} has {k} times as many, and [their friend|{q}'s cousin] {d.person()} has {d.n(3, 11)} fewer than {q}. "
        f"How many {thing} do [the three of them|all three] have [together|in total]?",
        f"{q} [gives|hands] half of {q.his} {base * k} {thing} to {p}, who [loses|has lost] {d.n(2, 10)} of {p.his} own {base}. How many {thing} does {p} [have now|end up with]?",
    )


def gym(d: Draw) -> tuple[str, str]:
    p, fee, visit, times = d.person(), d.n(20, 50, 5), d.n(3, 8), d.n(6, 14)
    return (
        f"[The swimming pool|A climbing hall|The gym] [asks|charges] ${fee} a month for members and ${visit} [more for every visit|on top for each visit]. "
        f"[{p} went there {times} times in [March|May|July]|In [March|May|July], {p} went there {times} times]. How much did {p.he} pay [that month|for the month]?",
        f"Without a membership one visit costs ${visit * 3}. How much [would {p} pay for {times} visits|would {times} visits cost {p}], and is that more than ${fee + visit * times}?",
    )


def bakery_orders(d: Draw) -> tuple[str, str]:
    trays, per, price = d.n(5, 15), d.n(12, 30, 2), d.n(2, 4)
    good = d.pick("muffins", "croissants", "cinnamon rolls", "bagels", "pretzels")
    return (
        f"[Before sunrise|Every morning] a bakery makes {trays} trays of {good} with {per} on a tray. {d.n(2, 4)} cafes [order|take] {d.n(10, 25)} {good} each, and [the rest are|what remains is] "
        f"sold in the shop for ${price} apiece. How much does the shop [take for them|make if all are sold]?",
        f"On a rainy day only {trays * per // 2} {good} are sold at ${price}, and {d.n(10, 30)} go to [a shelter|the food bank] for free. Flour and butter cost ${d.n(20, 60)}. How much does the bakery earn?",
    )


def school_trip(d: Draw) -> tuple[str, str]:
    classes, kids, teachers, bus_size = d.n(3, 7), d.n(18, 28), d.n(2, 6), d.pick(30, 40, 45, 50)
    return (
        f"[{classes} classes of {kids} students and {teachers * classes} teachers|The {classes * kids} students of a school and {teachers * classes} teachers] go [to the zoo|on a trip to a castle|to a museum]. "
        f"[One bus has|Each bus has] {bus_size} seats. How many buses [are needed|does the school have to hire]?",
        f"Entrance is ${d.n(3, 9)} for a student and ${d.n(10, 15)} for a teacher. [What does the school pay for|How much is it for] {kids} students and {teachers} teachers [?|altogether?]",
    )


def rain(d: Draw) -> tuple[str, str]:
    tank, rate, used = d.n(200, 600, 50), d.n(12, 40, 2), d.n(20, 60, 5)
    p = d.person()
    return (
        f"[A rain barrel holds|{p}'s rain barrel holds] {tank} liters [and is a quarter full|, of which a quarter is filled]. [During a storm|When it rains] {rate} liters [run|flow] into it every hour. "
        f"How many liters are [in it|in the barrel] after {d.n(2, 4)} hours?",
        f"[To water|For watering] the vegetables {p} takes {used} liters a day. [In how many days|After how many days] are {used * d.n(4, 9)} liters [gone|used up], and how many liters is that in a week?",
    )


def elevator(d: Draw) -> tuple[str, str]:
    floor, up, down = d.n(5, 12), d.n(4, 15), d.n(2, 8)
    p = d.person()
    return (
        f"{p} gets into the elevator on floor {floor}. [It goes|The elevator goes] up {up} floors, down {down} floors and [then|finally] up {d.n(2, 6)} more. [It needs|It takes] {d.n(2, 5)} seconds for each floor. "
        f"[How many seconds is {p} in the elevator|For how many seconds does the elevator move]?",
        f"Stairs have {d.n(14, 22)} steps between two floors. How many steps does {p} climb from floor 1 to floor {floor}[ , and how many there and back| twice a day]?",
    )


def phone_plan(d: Draw) -> tuple[str, str]:
    p, base, free, used, rate = d.person(), d.n(10, 30), d.n(100, 300, 50), d.n(320, 500, 20), d.pick(5, 10, 20)
    return (
        f"[{p}'s phone plan costs ${base} a month and includes|For ${base} a month {p} can talk on the phone for] {free} minutes. [Every further minute|Each minute beyond that] costs {rate} cents. "
        f"[In April {p.he} talked|Last month {p.he} called] for {used} minutes. [What was|How much was] the bill?",
        f"[Another plan|A plan without limits] costs ${base + 15} a month. How much would {p} pay [for it|with it] in a year, and how much [is the|is a] discount of 10%?",
    )


def concert_choir(d: Draw) -> tuple[str, str]:
    sopranos, k = d.n(8, 20, 2), d.n(2, 3)
    return (
        f"In [a choir|the choir of the town] there are {sopranos} sopranos, {d.n(3, 8)} more altos than sopranos, and half as many tenors as sopranos. "
        f"[There are {d.n(4, 9)} basses as well|{d.n(4, 9)} basses sing too]. How many [singers|people] are in the choir?",
        f"The {sopranos * k} [members|singers] [each buy a folder for ${d.n(4, 9)}|buy folders for ${d.n(4, 9)} each], and the choir pays ${d.n(40, 90, 5)} for a [hall|piano tuner]. What are all the costs?",
    )


def candles(d: Draw) -> tuple[str, str]:
    p, wax, per = d.person(), d.n(3, 9), d.n(4, 8)
    return (
        f"[From one pound of wax {p} can make|{p} knows that one pound of wax is enough for] {per} candles. {p.He} buys {wax} pounds at ${d.n(5, 9)} a pound and wicks for ${d.n(3, 8)}. "
        f"[All candles are sold|{p.He} sells all the candles] for ${d.n(4, 7)} each. What is {p.his} profit?",
        f"A candle burns for {d.n(5, 9)} hours. If {p} lights {d.n(2, 4)} candles at a time, how long do {per * 3} candles last, and how many does {p.he} need for {d.n(30, 60, 5)} hours with one candle at a time?",
    )


def soccer(d: Draw) -> tuple[str, str]:
    wins, draws_, losses = d.n(6, 15), d.n(2, 8), d.n(2, 7)
    team = d.pick("The Falcons", "The Otters", "The Blue Comets", "The Red Foxes", "The Harbor Kickers")
    return (
        f"[A win is worth 3 points and a draw 1 point|In the league you get 3 points for a win and 1 for a draw]. {team} [won {wins} games, drew {draws_} and lost {losses}|"
        f"had {wins} wins, {draws_} draws and {losses} losses]. [They were then fined {d.n(2, 6)} points|The league took {d.n(2, 6)} points from them]. How many points [do they have|are left]?",
        f"{team} scored {wins * 3} goals in {wins + draws_ + losses} games; [a third|one third] of them were scored by one player. How many goals did [that player|the others] score?",
    )


def knitting(d: Draw) -> tuple[str, str]:
    p, balls, hats, scarves = d.person(), d.n(2, 4), d.n(3, 8), d.n(2, 6)
    return (
        f"{p} [knits|is knitting] for [a fair|the grandchildren|charity]. A hat takes {balls} balls of wool and a scarf {balls + 2}. [How many balls does {p.he} need for {hats} hats and {scarves} scarves|"
        f"For {hats} hats and {scarves} scarves, how many balls are needed], [and what do they cost at ${d.n(3, 6)} a ball|if {d.n(2, 5)} balls are lying in the drawer already]?",
        f"[One row of a sweater has|A sweater has rows of] {d.n(60, 120, 10)} stitches, and {p} makes {d.n(20, 40, 5)} stitches a minute. How many stitches are in {d.n(10, 40, 5)} rows[?| , and how many does {p.he} make in an hour?]",
    )


def pizza(d: Draw) -> tuple[str, str]:
    people, slices, pizzas = d.n(5, 12), d.n(2, 4), d.n(4, 9)
    p = d.person()
    return (
        f"[At {p}'s birthday|For a movie night at {p}'s place] {pizzas} pizzas are cut into 8 slices each. [{people} guests eat {slices} slices each|Each of the {people} guests eats {slices} slices] and {p} eats {d.n(2, 5)}. "
        f"[What is left|How many slices are left] [for the next day|in the boxes]?",
        f"[A pizza costs|They pay for each pizza] ${d.n(9, 14)}. Delivery is ${d.n(3, 6)}, and a tip of ${d.n(4, 8)} is added. What does each of {pizzas} people pay for {pizzas * 2} pizzas [if they share the cost|when they split it evenly]?",
    )


def rope(d: Draw) -> tuple[str, str]:
    p, parts, each, rest = d.person(), d.n(4, 12), d.n(15, 60, 5), d.n(10, 90, 5)
    return (
        f"{p} cuts {parts} pieces of {each} centimeters from a [rope|ribbon|wire], and {rest} centimeters [are left|remain]. [How long was|What was the length of] the [whole|uncut] piece? [Give the answer in centimeters.|]",
        f"[Another one|A second one] is {parts * each * 2} centimeters long. How many pieces of {each * 2} centimeters can {p} [cut from it|make of it], and how many cuts does {p.he} need?",
    )


def salary(d: Draw) -> tuple[str, str]:
    p, pay, rent, food = d.person(), d.n(1800, 4200, 100), d.n(600, 1100, 50), d.n(200, 450, 25)
    return (
        f"[{p} earns|{p}'s job pays {p.him}] ${pay} a month. [Out of this {p.he} pays|{p.He} spends] ${rent} for [the apartment|rent], ${food} for food and half as much for [transport|clothes] as for food. "
        f"[The rest is saved|{p.He} saves what remains]. How much does {p.he} save in [half a year|a year|{d.n(3, 5)} months]?",
        f"[{p} gets a raise of {d.pick(5, 10)}%|{p}'s boss raises the pay by {d.pick(5, 10)}%] [from|on] ${pay}. [How much more is that|How many more dollars is that] in a year?",
    )


def ages(d: Draw) -> tuple[str, str]:
    p, q, r = d.person(), d.person(), d.person()
    age, k, diff, years = d.n(6, 15), d.n(2, 4), d.n(2, 6), d.n(4, 12)
    return (
        f"{p} is {age} years old. [{p.His} mother|{p.His} father|{p.His} aunt] is {k + 1} times as old, and {p.his} [cousin|friend|neighbor] {q} is {diff} years [older|younger] than {p}. "
        f"[What is the sum of their ages|How old will the three be together in {years} years]?",
        f"{r} is twice as old as {q} [was {diff} years ago|will be in {diff} years], and {q} is {age + diff} now. How old is {r}?",
    )


def printer(d: Draw) -> tuple[str, str]:
    rate, copies, sheets, pack = d.n(12, 40, 2), d.n(20, 60, 10), d.n(4, 18, 2), d.pick(100, 250, 500)
    return (
        f"[An office printer makes|The printer in the office makes] {rate} pages a minute. {d.person()} [wants|needs] {copies} copies of a report of {sheets} pages, and {d.n(1, 3) * rate} pages [come out spoiled|have to be printed again]. How many minutes does the printer run?",
        f"Paper [is sold|comes] in packs of {pack} sheets for ${d.n(4, 9)}. [The office uses {pack // 50 * 20} sheets a day|Every day {pack // 50 * 20} sheets are used]. What does paper for {d.n(5, 20, 5)} days cost?",
    )


SCENARIOS = (
    orchard,
    library,
    aquarium,
    theater,
    allowance,
    bees,
    marathon,
    eggs,
    fence,
    bus,
    pages,
    paint,
    stamps,
    gym,
    bakery_orders,
    school_trip,
    rain,
    elevator,
    phone_plan,
    concert_choir,
    candles,
    soccer,
    knitting,
    pizza,
    rope,
    salary,
    ages,
    printer,
)
