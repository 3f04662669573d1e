"use strict";
const el = Object.fromEntries([...document.querySelectorAll("[id]")].map(node => [node.id, node]));

// ---- state: what was said, what the next turn holds, and the answer under way ----

let turns = [];       // {text, pictures, answer}: the answer is null while it streams
let editing = null;   // the number of the turn that the composer holds: from there on all goes when it is sent
let attached = [];    // {url, label, kind} of the next turn; a file of the kind "rejected" must be removed before it is sent
let numLoading = 0;   // files that are being read
let running = null;   // AbortController of the answer that streams
let isAway = false;   // the server was not there when it was asked last

/** Turns before the next one. */
const kept = () => editing === null ? turns : turns.slice(0, editing);
const numPicturesOf = some => some.reduce((sum, turn) => sum + turn.pictures.length, 0);

/** Return the API's messages of these turns, after the system prompt. */
function messagesOf(some) {
  const system = el.system.value.trim(), messages = system ? [{ role: "system", content: system }] : [];
  for (const { text, pictures, answer } of some) {
    messages.push({ role: "user", content: pictures.length ? [...pictures.map(partOf), ...(text ? [{ type: "text", text }] : [])] : text });
    if (answer) messages.push({ role: "assistant", content: answer.text });
  }
  return messages;
}

// ---- what survives a reload: the chats, never the key ----

const STORED = "chats";
let chats = [];       // {title, turns}, the newest first
let current = null;   // the chat that is shown; null: a new one

/** Store all chats; the oldest ones go if the browser has no space for all. */
function save() {
  chats = chats.filter(chat => chat !== current);
  if (turns.length) chats.unshift(current = { title: (turns[0].text || turns[0].pictures[0].label).slice(0, 80), turns });
  else current = null;
  while (chats.length) {
    try {
      localStorage.setItem(STORED, JSON.stringify(chats));
      break;
    } catch {
      const lost = chats.pop();
      showProblem(chats.length ? `The browser has no space for the chat "${lost.title}".` : "This chat has become too large to survive a reload.");
    }
  }
  if (!chats.length) localStorage.removeItem(STORED);
  showChats();
}

function restore() {
  try {
    chats = JSON.parse(localStorage.getItem(STORED)) ?? [];
  } catch {
    chats = [];
  }
  open(chats[0] ?? null);
}

/** Show a chat, or an empty one. */
function open(chat) {
  running?.abort();
  running = null;
  el.stop.hidden = true;
  el.send.hidden = false;
  document.body.classList.remove("listing");
  current = chat;
  turns = chat?.turns ?? [];
  editing = null;
  attached = [];
  showProblem("");
  setQuestion("");
  if (!chat) showExamples();
  showChats();
  showTurns();
  scrollDown();
  el.question.focus();
}

function showChats() {
  el.list.replaceChildren(...chats.map(chat => {
    const remove = button("×", `Delete the chat ${chat.title}`, () => {
      chats = chats.filter(one => one !== chat);
      if (chat === current) { turns = []; current = null; }
      save();
      if (!current) open(null);
    });
    return make("li", { className: chat === current ? "current" : "" }, button(chat.title, chat.title, () => open(chat)), remove);
  }));
  el.chats.hidden = el.menu.hidden = !chats.length;
}

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function button(text, title, act, className = "") {
  const node = make("button", { type: "button", className, textContent: text, title, ariaLabel: title });
  node.addEventListener("click", act);
  return node;
}

// ---- answers: Markdown, boxes ----

const ALLOWED = { ALLOWED_TAGS: "a blockquote br code del em h3 h4 hr li ol p pre strong table tbody td th thead tr ul".split(" "), ALLOWED_ATTR: ["href", "start"] };
marked.use({ renderer: {
  html: ({ text }) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"), // HTML in an answer is shown as text
  image: ({ raw }) => raw,
  heading({ tokens, depth }) { return `<h${depth < 3 ? 3 : 4}>${this.parser.parseInline(tokens)}</h${depth < 3 ? 3 : 4}>`; },
} });

/** Return the nodes of an answer in Markdown. */
function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), { ...ALLOWED, RETURN_DOM_FRAGMENT: true });
  fragment.querySelectorAll("a").forEach(link => Object.assign(link, { target: "_blank", rel: "noopener noreferrer" }));
  return [...fragment.childNodes].filter(node => node.textContent.trim() || node.tagName === "HR");
}

const BOX_INKS = ["#d7263d", "#1b7fbd", "#2a9d4a", "#b3541e", "#7b2cbf", "#0f766e"];

/** `{"bbox_2d": [x1, y1, x2, y2], "label": ...}` in an answer, wherever they stand. */
function boxesOf(text) {
  return [...text.matchAll(/\{[^{}]*"bbox_2d"[^{}]*\}/g)].flatMap(([json]) => {
    try {
      const box = JSON.parse(json), numbers = box.bbox_2d;
      return Array.isArray(numbers) && numbers.length === 4 && numbers.every(Number.isFinite) ? [{ numbers, label: String(box.label ?? "") }] : [];
    } catch {
      return [];
    }
  });
}

/** The last picture with its boxes: in thousandths of it, or in pixels where a number is larger. */
function boxed(picture, boxes) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), image = make("img", { src: picture.url, alt: `${picture.label}, with ${boxes.length} boxes` });
  const figure = make("figure", { className: "boxed" }, image, svg);
  image.addEventListener("click", () => showLarge(picture));
  image.addEventListener("load", () => {
    const inPixels = boxes.some(box => Math.max(...box.numbers) > 1000);
    const width = inPixels ? image.naturalWidth : 1000, height = inPixels ? image.naturalHeight : 1000;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    boxes.forEach(({ numbers: [x1, y1, x2, y2], label }, i) => {
      const rect = document.createElementNS(svg.namespaceURI, "rect"), ink = BOX_INKS[i % BOX_INKS.length];
      const sides = { x: Math.min(x1, x2), y: Math.min(y1, y2), width: Math.abs(x2 - x1), height: Math.abs(y2 - y1), stroke: ink };
      Object.entries(sides).forEach(([name, value]) => rect.setAttribute(name, value));
      svg.append(rect);
      if (!label) return;
      const caption = make("figcaption", { textContent: label });
      Object.assign(caption.style, { left: `${100 * sides.x / width}%`, top: `${100 * sides.y / height}%`, background: ink });
      figure.append(caption);
    });
  }, { once: true });
  return figure;
}

function showLarge(picture) {
  el["large-image"].src = picture.url;
  el["large-image"].alt = picture.label;
  el.large.showModal();
}

// ---- pictures that the page draws ----

const INKS = { red: "#d71e23", green: "#1e9632", blue: "#1e46d7", orange: "#fa870f", purple: "#8728af" };
const SHAPES = { square: [4, 1, 1 / 4], triangle: [3, 1, -1 / 2], diamond: [4, 0.63, -1 / 2], star: [10, 0.4, -1 / 2], circle: [60, 1, 0] }; // corners, inner radius, turn
const pickOne = list => list[Math.floor(Math.random() * list.length)];
const shuffled = list => list.map(value => [Math.random(), value]).sort((a, b) => a[0] - b[0]).map(pair => pair[1]);

function draw(ink, paint) {
  const canvas = make("canvas", { width: 224, height: 160 }), pen = canvas.getContext("2d");
  pen.fillStyle = "#f2f1ec";
  pen.fillRect(0, 0, 224, 160);
  pen.translate(112, 80);
  pen.fillStyle = INKS[ink];
  paint(pen);
  return canvas.toDataURL("image/png");
}

function drawNumber() {
  const number = String(100 + Math.floor(Math.random() * 900)), ink = pickOne(Object.keys(INKS));
  const url = draw(ink, pen => {
    Object.assign(pen, { font: '700 74px "DejaVu Sans", Verdana, Arial, sans-serif', textAlign: "center", textBaseline: "middle" });
    pen.fillText(number, 0, 4);
  });
  return { url, kind: "number", label: `the number ${number} in ${ink}` };
}

function drawShape(shape = pickOne(Object.keys(SHAPES)), ink = pickOne(Object.keys(INKS))) {
  const [corners, inner, turn] = SHAPES[shape];
  const url = draw(ink, pen => {
    pen.beginPath();
    for (let i = 0; i < corners; i++) {
      const angle = Math.PI * (turn + 2 * i / corners), radius = i % 2 ? 64 * inner : 64;
      pen.lineTo(radius * Math.cos(angle), radius * Math.sin(angle));
    }
    pen.fill();
  });
  return { url, kind: "shape", label: `a drawn shape: ${ink} ${shape}` };
}

// ---- examples and suggestions ----

function showExamples() {
  const shapes = shuffled(Object.keys(SHAPES)).slice(0, 3), inks = shuffled(Object.keys(INKS));
  const examples = [
    [[drawNumber(), drawNumber(), drawNumber()], "List the numbers in all pictures in order."],
    [shapes.map((shape, i) => drawShape(shape, inks[i])), `Which picture shows the ${pickOne(shapes)}?`],
    [[drawShape(), drawNumber()], "What colour is the shape in picture 1?"],
  ];
  const askExample = (pictures, question) => { attached = [...pictures]; setQuestion(question); send(); };
  el.examples.replaceChildren(...examples.map(([pictures, question]) => {
    const example = button("", question, () => askExample(pictures, question), "example"), previews = pictures.map(({ url, label }) => make("img", { src: url, alt: label }));
    example.append(make("span", { className: "pictures" }, ...previews), make("span", { textContent: question }));
    return make("li", {}, example);
  }));
  el.words.replaceChildren("or in words:", ...["What can you do?", "Count to 20."].map(question => button(question, question, () => askExample([], question), "idea")));
}

/** Suggest questions about the attached pictures. */
function showIdeas() {
  const first = numPicturesOf(kept()) + 1, good = attached.filter(isGood), asked = { number: "What number is in picture", shape: "What colour is the shape in picture" };
  const questions = good.flatMap(({ kind }, i) => asked[kind] ? [`${asked[kind]} ${first + i}?`] : []).slice(-2);
  if (good.length) questions.push(`Describe picture ${first + good.length - 1}.`);
  el.ideas.replaceChildren(...questions.map(text => button(text, text, () => { setQuestion(text); el.question.focus(); }, "idea")));
  el.ideas.hidden = !questions.length || running !== null;
}

// ---- the next turn ----

function setQuestion(text) {
  el.question.value = text;
  fitQuestion();
}

function fitQuestion() {
  el.question.style.height = "auto";
  el.question.style.height = `${el.question.scrollHeight}px`;
  el.send.disabled = running !== null || numLoading > 0 || !attached.every(isGood) || !(el.question.value.trim() || attached.length);
}

function thumb(picture, number) {
  const isVideo = picture.kind === "video", label = `${isVideo ? "Video" : "Picture"} ${number}: ${picture.label}`;
  const shown = isVideo
    ? make("video", { src: picture.url, controls: true, muted: true, playsInline: true, ariaLabel: label })
    : make("img", { src: picture.url, alt: label });
  if (!isVideo) shown.addEventListener("click", () => showLarge(picture));
  return make("figure", { className: "thumb" }, shown, make("figcaption", { textContent: number }));
}

/** A picture or video as a part of the API's content. */
function partOf({ kind, url }) {
  return kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
}

/** Whether a file may be sent. */
function isGood({ kind }) { return kind !== "rejected"; }

function showAttached() {
  let number = numPicturesOf(kept());
  el.attached.replaceChildren(...attached.map((picture, i) => {
    const node = isGood(picture) ? thumb(picture, ++number) : make("figure", { className: "thumb rejected", textContent: `Rejected: ${picture.label}` });
    node.setAttribute("role", "listitem");
    node.append(button("×", isGood(picture) ? `Remove picture ${number}` : `Remove the rejected file ${picture.label}`, () => {
      attached.splice(i, 1);
      if (attached.every(isGood)) showProblem("");
      showAttached();
      el.question.focus();
    }));
    return node;
  }));
  fitQuestion();
  showIdeas();
}

function attach(picture) {
  attached.push(picture);
  showProblem("");
  showAttached();
}

/** Whether this browser can show a picture. It cannot show TIFF and some videos that the server reads. */
async function isReadable(url, type) {
  if (type === "image/tiff" || type.startsWith("video/")) return true;
  const image = new Image();
  image.src = url;
  return image.decode().then(() => true, () => false);
}

async function attachFiles(files) {
  const rejected = { "No picture or video": [], "Save its pages as pictures to send them": [], "Broken, or of a kind that cannot be read": [] };
  const reject = (file, reason) => { attach({ url: "", kind: "rejected", label: file.name }); Object.values(rejected)[reason].push(file.name); };
  numLoading += files.length;
  for (const file of files) {
    const kind = { image: "file", video: "video" }[file.type.split("/")[0]];
    const url = kind && await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    }).catch(() => null);
    const isRead = url && await isReadable(url, file.type);
    numLoading--;
    if (isRead) attach({ url, kind, label: file.name });
    else reject(file, kind ? 2 : file.type === "application/pdf" ? 1 : 0);
  }
  const reasons = Object.entries(rejected).filter(([, names]) => names.length).map(([reason, names]) => `${reason}: ${names.join(", ")}.`);
  if (reasons.length) showProblem([...reasons, "Remove it to send the question."].join(" "));
}

function showProblem(text, isGood = false) {
  el.problem.textContent = text;
  el.problem.className = isGood ? "good" : "";
  el.problem.hidden = !text;
}

// ---- asking ----

function headers() {
  const key = el.key.value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** Return the next request, without streaming options. */
function settled() {
  const temperature = el.temperature.valueAsNumber, most = el["max-tokens"].valueAsNumber;
  return { messages: messagesOf(turns), ...(temperature >= 0 ? { temperature } : {}), ...(most >= 1 ? { max_tokens: Math.floor(most) } : {}) };
}

/** The same request for a shell and for Python. The key stays here. */
function asCurl(request) {
  const key = el.key.value ? ` -H "Authorization: Bearer $API_KEY"` : "";
  return `curl -s ${location.origin}/v1/chat/completions -H 'Content-Type: application/json'${key} -d @- <<'EOF'\n${JSON.stringify(request)}\nEOF\n`;
}

function asPython(request) {
  const key = el.key.value ? 'os.environ["API_KEY"]' : '"none"', { messages, ...others } = request;
  const options = Object.entries(others).map(([name, value]) => `, ${name}=${JSON.stringify(value)}`).join("");
  return `import json
import os

import openai

client = openai.OpenAI(base_url="${location.origin}/v1", api_key=${key})
messages = json.loads(${JSON.stringify(JSON.stringify(messages))})
answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages${options})
print(answer.choices[0].message.content)
`;
}

function copyButton(icon, title, text, className) {
  const node = button(icon, title, async () => {
    node.textContent = await copy(text()) ? "✓" : "✗";
    setTimeout(() => { node.textContent = icon; }, 1500);
  }, className);
  return node;
}

/** Browsers give pages of other hosts without https no clipboard but this older way to it. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { className: "hidden", value: text });
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

/** The words for an HTTP answer that is no success: the server's own where it has some. */
function wordsOf(status, body) {
  if (status === 401) return `${askForKey()}. Enter it at the top of the page and send again.`;
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `The server answered with status ${status}.`;
  }
}

/** Of a server that refuses: says which, no key or a wrong one. */
function askForKey() {
  el["key-form"].hidden = false;
  return el.key.value.trim() ? "The server wants another API key" : "The server wants an API key";
}

async function checkServer() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) {
      setStatus(response.status === 401 ? askForKey().replace("The server wants", "needs") : "not ready", false);
      if (response.status === 401) el.key.focus();
      return;
    }
    setStatus(`model ${(await response.json()).data[0].id}`, true);
  } catch {
    isAway = true;
    setStatus("cannot be reached", false);
  }
}

/** Now and then, as long as somebody looks: says when the server is gone and when it is back. */
async function watchServer() {
  if (!document.hidden && !running) {
    const isWell = await fetch("/health").then(response => response.ok, () => false);
    if (!isWell && !isAway) setStatus("cannot be reached, or not ready", false);
    if (isWell && isAway) {
      await checkServer();
      showProblem("The server is back.", true);
    }
    isAway = !isWell;
  }
  setTimeout(watchServer, isAway ? 2000 : 10000);
}

function setStatus(text, good) {
  el.status.textContent = text;
  el.status.className = good ? "good" : "bad";
}

/** Sends a request: an XMLHttpRequest, for fetch does not say how much of a body has left. */
function post(body, signal, onPhase) {
  const request = new XMLHttpRequest();
  request.open("POST", "/v1/chat/completions");
  Object.entries(headers()).forEach(([name, value]) => request.setRequestHeader(name, value));
  request.upload.onprogress = event => onPhase(event.loaded < event.total ? `Sending ${Math.floor(100 * event.loaded / event.total)} %` : "Reading");
  request.upload.onload = () => onPhase("Reading");
  signal.addEventListener("abort", () => request.abort());
  request.send(body);
  return request;
}

/** Yields the parsed `data:` messages of its event stream until [DONE]. Throws the words for an answer that is no success. */
async function* eventsOf(request) {
  let wake = () => {}, position = 0, isOver = false;
  request.onprogress = () => wake();
  request.onloadend = () => { isOver = true; wake(); };
  for (;;) {
    const end = request.responseText.lastIndexOf("\n\n");
    if (request.status === 200 && end >= position) {
      const parts = request.responseText.slice(position, end).split("\n\n");
      position = end + 2;
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    } else if (isOver) {
      if (request.status === 0) throw "The server cannot be reached. Is it still running?";
      if (request.status !== 200) throw wordsOf(request.status, request.responseText);
      throw "The answer broke off: the server closed the connection.";
    } else await new Promise(resolve => { wake = resolve; });
  }
}

/** Streams the answer to a request into `node`. Returns what was said, and in `words` what went wrong, if anything. */
async function stream(node, request, numPictures) {
  const answer = { text: "", thoughts: "", words: "", first: 0, usage: null, timings: null, reason: "", rows: [] }, started = performance.now();
  const phase = node.querySelector(".phase"), text = node.querySelector(".text"), signal = running.signal;
  let isDrawing = false;
  const redraw = () => { isDrawing = false; text.replaceChildren(...markdown(answer.text)); scrollDown(); };
  try {
    const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true }, timings: true });
    for await (const event of eventsOf(post(body, signal, words => { if (!answer.first) phase.textContent = words; }))) {
      if (event.error) { answer.words = event.error.message; break; }
      const choice = event.choices[0], said = choice?.delta.content, thought = choice?.delta.reasoning;
      if (said || thought) {
        answer.first ||= performance.now();
        phase.textContent = "";
        answer.text += said ?? "";
        answer.thoughts += thought ?? "";
        node.querySelector(".thoughts").textContent = answer.thoughts;
        if (!isDrawing) { isDrawing = true; requestAnimationFrame(redraw); } // once a frame, however fast tokens come
      }
      answer.reason = choice?.finish_reason ?? answer.reason;
      answer.usage = event.usage ?? answer.usage;
      answer.timings = event.timings ?? answer.timings;
    }
  } catch (problem) {
    if (signal.aborted) answer.reason = "stopped";
    else if (typeof problem === "string") answer.words = problem;
    else throw problem;
  }
  phase.textContent = "";
  if (answer.first) answer.rows = rowsOf(answer, started, numPictures);
  return answer;
}

/** Names and values of what is shown below an answer. The speed is by the server's clock; that of few tokens says nothing. */
function rowsOf(answer, started, numPictures) {
  const { usage, timings } = answer, rows = [["First token", `${Math.round(answer.first - started)} ms`]];
  if (usage) {
    rows.push(["Tokens", `${usage.completion_tokens}`]);
    if (usage.completion_tokens >= 16 && timings?.generation_ms > 0) rows.push(["Speed", `${Math.round(1000 * (usage.completion_tokens - 1) / timings.generation_ms)} tokens/s`]);
    const drafts = usage.completion_tokens_details, accepted = drafts?.accepted_prediction_tokens;
    if (accepted !== undefined) rows.push(["Accepted drafts", `${accepted} of ${accepted + drafts.rejected_prediction_tokens} tokens`]);
    rows.push(["Cached prompt", `${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} tokens`]);
  }
  if (timings?.video_frames) rows.push(["Frames read", `${timings.video_frames}`], ["Pictures and frame pairs encoded", `${timings.images_encoded}`]);
  else if (timings && numPictures) rows.push(["Cached pictures", `${Math.max(0, numPictures - timings.images_encoded)} of ${numPictures}`]);
  if (answer.reason === "length") rows.push(["Ended", "at the token limit"]);
  if (answer.reason === "stopped") rows.push(["Ended", "stopped by you"]);
  return rows;
}

function timingsOf(rows) {
  const cells = rows.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })));
  return make("details", { className: "timings", open: !matchMedia("(max-width: 480px)").matches }, make("summary", { textContent: "Timings" }), make("dl", { className: "numbers" }, ...cells));
}

// ---- the conversation ----

/** Nodes of turn `index`; the answer's is empty while there is none. */
function nodesOf(turn, index) {
  const mine = make("article", { className: "turn mine", ariaLabel: "You" }), first = numPicturesOf(turns.slice(0, index)) + 1;
  const theirs = make("article", { className: "turn theirs", ariaLabel: "Answer", ariaBusy: String(!turn.answer) }, make("div", { className: "thoughts" }), make("div", { className: "phase" }), make("div", { className: "text" }));
  if (turn.pictures.length) mine.append(make("div", { className: "thumbs" }, ...turn.pictures.map((picture, i) => thumb(picture, first + i))));
  if (turn.text) mine.append(make("div", { className: "text", textContent: turn.text }));
  if (editing !== null && index >= editing) [mine, theirs].forEach(node => node.classList.add("old"));
  if (turn.answer) {
    const { text, thoughts, rows } = turn.answer, pictures = turns.slice(0, index + 1).flatMap(one => one.pictures).filter(one => one.kind !== "video"), boxes = boxesOf(text);
    const request = () => ({ ...settled(), messages: messagesOf([...turns.slice(0, index), { ...turn, answer: null }]) });
    theirs.querySelector(".thoughts").textContent = thoughts;
    theirs.querySelector(".text").append(...markdown(text));
    if (boxes.length && pictures.length) theirs.append(boxed(pictures.at(-1), boxes));
    mine.append(make("div", { className: "actions" }, button("✎", "Edit", () => edit(index)), button("×", "Delete", () => forget(index))));
    theirs.append(timingsOf(rows), make("div", { className: "actions" },
      copyButton("❐", "Copy answer", () => text), copyButton("$", "Copy as curl", () => asCurl(request()), "code"),
      copyButton("Py", "Copy as Python", () => asPython(request()), "code"), button("↻", "Retry", () => retry(index))));
  }
  return [mine, theirs];
}

function showTurns() {
  el.log.replaceChildren(...turns.flatMap(nodesOf));
  el.welcome.hidden = turns.length > 0;
  showAttached();
}

/** The turn goes to the composer. It and those behind it stay until that is sent; Escape keeps them. */
function edit(index) {
  if (running) return;
  editing = index;
  attached = [...turns[index].pictures];
  setQuestion(turns[index].text);
  showTurns();
  el.question.focus();
}

function stopEditing() {
  editing = null;
  attached = [];
  setQuestion("");
  showTurns();
}

function forget(index) {
  if (running) return;
  turns.splice(index, 1);
  editing = null;
  save();
  showTurns();
}

/** Asks a turn again; those behind it go. */
function retry(index) {
  if (running) return;
  editing = null;
  const before = turns;
  turns = turns.slice(0, index);
  ask({ ...before[index], answer: null }, before);
}

function send() {
  const text = el.question.value.trim(), pictures = attached, before = editing === null ? null : turns;
  if (running || numLoading || !pictures.every(isGood) || !(text || pictures.length)) return;
  turns = kept();
  editing = null;
  attached = [];
  setQuestion("");
  ask({ text, pictures, answer: null }, before);
}

/** Asks for the answer to a turn. Without one, `before` comes back, or the turn goes back to the composer, where it can be sent again. */
async function ask(turn, before) {
  showProblem("");
  turns = [...turns, turn];
  const controller = running = new AbortController();
  showTurns();
  el.stop.hidden = false;
  el.send.hidden = true;
  scrollDown();
  const answer = await stream(el.log.lastElementChild, settled(), numPicturesOf(turns));
  if (running !== controller) return; // a new chat was begun
  running = null;
  if (answer.text) turn.answer = { text: answer.text, thoughts: answer.thoughts, rows: answer.rows };
  else {
    if (answer.reason === "length") answer.words = "The model reached the token limit before it answered.";
    turns = before ?? turns.slice(0, -1);
    attached = [...turn.pictures, ...attached];
    if (before) attached = [];
    else if (!el.question.value) setQuestion(turn.text);
  }
  if (answer.words) { showProblem(answer.words); checkServer(); }
  el.stop.hidden = true;
  el.send.hidden = false;
  save();
  showTurns();
  scrollDown();
  el.question.focus();
}

function scrollDown() {
  el.main.scrollTop = el.main.scrollHeight;
}

// ---- events ----

el.composer.addEventListener("submit", event => { event.preventDefault(); send(); });
el.question.addEventListener("input", fitQuestion);
el.question.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && !el.large.open) running ? running.abort() : editing !== null && stopEditing(); });
el.large.addEventListener("click", () => el.large.close());
el.more.addEventListener("click", () => { el.more.ariaExpanded = String(el.composer.classList.toggle("unfolded")); });
el.stop.addEventListener("click", () => running?.abort());
el.new.addEventListener("click", () => open(null));
el.menu.addEventListener("click", () => document.body.classList.toggle("listing"));
el.pick.addEventListener("click", () => el.files.click());
el.files.addEventListener("change", async () => { await attachFiles([...el.files.files]); el.files.value = ""; });
el["draw-number"].addEventListener("click", () => attach(drawNumber()));
el["draw-shape"].addEventListener("click", () => attach(drawShape()));
el["key-form"].addEventListener("submit", event => { event.preventDefault(); checkServer(); });
el.key.addEventListener("change", checkServer);
document.addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attachFiles(files); }
});
document.addEventListener("dragover", event => {
  event.preventDefault();
  document.body.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
});
document.addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
document.addEventListener("drop", event => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  attachFiles([...event.dataTransfer.files]);
});

showExamples();
restore();
checkServer();
setTimeout(watchServer, 2000);
