"use strict";
const el = Object.fromEntries([...document.querySelectorAll("[id]")].map(node => [node.id, node]));

let messages = [];  // of the API
let attached = [];  // {kind, url, name}
let running = null;  // AbortController of an answer

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function box(className, text = "", ...children) { return make("div", { className }, text, ...children); }

function button(textContent, ariaLabel, act) {
  const node = make("button", { type: "button", textContent, ariaLabel });
  node.addEventListener("click", () => act(node));
  return node;
}

const TAGS = "a blockquote br code del em h1 h2 h3 h4 hr li ol p pre strong table tbody td th thead tr ul";
const CLEAN = { ALLOWED_TAGS: TAGS.split(" "), ALLOWED_ATTR: ["href", "start"], RETURN_DOM_FRAGMENT: true };
marked.use({ renderer: { html: ({ text }) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"), image: ({ raw }) => raw } }); // shown as text

/** Return an answer in Markdown as nodes. */
function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), CLEAN);
  fragment.querySelectorAll("a").forEach(link => Object.assign(link, { target: "_blank", rel: "noopener" }));
  return fragment;
}

function countPictures() {
  return messages.flatMap(({ content }) => content).filter(part => part.type?.endsWith("_url")).length;
}

function thumb({ kind, url, name }, number) {
  const alt = `Picture ${number}: ${name}`, isVideo = kind === "video";
  const shown = make(isVideo ? "video" : "img", { src: url, alt, ariaLabel: alt, controls: isVideo, muted: true });
  return make("figure", { className: "thumb" }, shown, make("figcaption", { textContent: number }));
}

function showComposer() {
  const first = countPictures() + 1;
  el.attached.replaceChildren(...attached.map((file, i) => {
    const node = thumb(file, first + i);
    node.append(button("×", `Remove picture ${first + i}`, () => { attached.splice(i, 1); showComposer(); el.question.focus(); }));
    return node;
  }));
  el.send.disabled = running || !(el.question.value.trim() || attached.length);
  el.send.hidden = running;
  el.stop.hidden = !running;
  el.welcome.hidden = messages.length > 0;
}

async function attachFiles(files) {
  showProblem("");
  for (const file of files) {
    const kind = file.type.split("/")[0];
    const reader = new FileReader();
    await new Promise(resolve => { reader.onloadend = resolve; reader.readAsDataURL(file); });
    if (/image|video/.test(kind) && reader.result) attached.push({ kind, url: reader.result, name: file.name });
    else showProblem(`${file.name} is not a readable picture or video.`);
  }
  showComposer();
}

function showProblem(text) {
  el.problem.textContent = text;
  el.problem.hidden = !text;
}

function headers() {
  const key = el.key.value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checkServer() {
  const response = await fetch("/v1/models", { headers: headers() }).catch(() => null), needsKey = response?.status === 401;
  const model = response?.ok && (await response.json()).data[0].id;
  if (needsKey) { el["key-form"].hidden = false; el.key.focus(); }
  el.status.textContent = model || (needsKey ? "needs an API key" : "not ready");
  el.status.className = model ? "good" : "bad";
}

/** Yield the events of a stream. Messages of Errors are for the user. */
async function* eventsOf(body, signal) {
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body, signal })
    .catch(problem => { throw signal.aborted ? problem : new Error("The server cannot be reached."); });
  if (!response.ok) {
    if (response.status === 401) throw new Error("The server needs an API key: enter it at the top and send again.");
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `The server answered with status ${response.status}.`);
  }
  let text = "";
  for (const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();;) {
    const { value, done } = await reader.read().catch(problem => { if (signal.aborted) throw problem; return { done: true }; });
    if (done) throw new Error("The answer broke off: the server closed the connection.");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue; // a comment
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

async function send() {
  const question = el.question.value.trim(), files = attached, first = countPictures() + 1;
  if (running || !(question || files.length)) return;
  const content = files.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  if (question) content.push({ type: "text", text: question });
  messages.push({ role: "user", content });
  const thumbs = box("thumbs", "", ...files.map((file, i) => thumb(file, first + i)));
  const mine = make("article", { className: "turn mine", ariaLabel: "You" }, thumbs, box("text", question));
  const theirs = make("article", { className: "turn theirs", ariaLabel: "Answer", ariaBusy: "true" }, box("thoughts"), box("text"));
  el.log.append(mine, theirs);
  attached = [];
  el.question.value = "";
  showProblem("");
  const controller = running = new AbortController(), sent = [...messages];
  showComposer();
  scrollDown();
  const answer = await stream(theirs, sent, controller.signal);
  if (running !== controller) return; // a new chat has begun
  running = null;
  theirs.ariaBusy = "false";
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
    theirs.append(box("timings", answer.timings.join(" · "), button("Copy as curl", "Copy as curl", node => copyCurl(sent, node))));
  } else { // the turn returns to the composer
    messages.pop();
    [mine, theirs].forEach(node => node.remove());
    attached.unshift(...files);
    el.question.value ||= question;
  }
  if (answer.problem) { showProblem(answer.problem); checkServer(); }
  showComposer();
  scrollDown();
  if (document.activeElement !== el.key) el.question.focus();
}

/** Stream an answer into `node`. */
async function stream(node, sent, signal) {
  const started = performance.now(), [thoughts, text] = node.children, answer = { text: "", timings: [], problem: "" };
  let first = 0, usage, timings, reason, isDrawing = false;
  const draw = () => { isDrawing = false; text.replaceChildren(markdown(answer.text)); scrollDown(); };
  try {
    const body = JSON.stringify({ messages: sent, stream: true, stream_options: { include_usage: true }, timings: true });
    for await (const event of eventsOf(body, signal)) {
      const choice = event.choices[0];
      if (choice?.delta.content || choice?.delta.reasoning) {
        first ||= performance.now();
        answer.text += choice.delta.content ?? "";
        thoughts.textContent += choice.delta.reasoning ?? "";
        if (!isDrawing) { isDrawing = true; requestAnimationFrame(draw); } // once per frame
      }
      reason = choice?.finish_reason ?? reason;
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
    }
    if (!answer.text) answer.problem = `The answer is empty (${reason}).`;
  } catch (problem) {
    if (signal.aborted) reason = "stopped";
    else answer.problem = problem.message;
  }
  draw();
  if (first) answer.timings.push(`First token ${Math.round(first - started)} ms`);
  if (usage) {
    const count = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    answer.timings.push(`${count} tokens`);
    if (count >= 16 && timings) answer.timings.push(`${Math.round(1000 * (count - 1) / timings.generation_ms)} tokens/s`);
    answer.timings.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  if (reason !== "stop") answer.timings.push(reason); // length, stopped
  return answer;
}

/** Copy a request as a command; `navigator.clipboard` needs https. */
function copyCurl(sent, node) {
  const key = el.key.value ? ` -H "Authorization: Bearer $API_KEY"` : "", data = JSON.stringify({ messages: sent });
  const command = `curl -s ${location.origin}/v1/chat/completions -H 'Content-Type: application/json'${key} -d @- <<'EOF'\n${data}\nEOF\n`;
  const area = make("textarea", { className: "hidden", value: command });
  document.body.append(area);
  area.select();
  node.textContent = document.execCommand("copy") ? "Copied" : "Copying failed";
  area.remove();
}

function scrollDown() { el.main.scrollTop = el.main.scrollHeight; }

el.composer.addEventListener("submit", event => { event.preventDefault(); send(); });
el.question.addEventListener("input", showComposer);
el.question.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
el.stop.addEventListener("click", () => running?.abort());
el.new.addEventListener("click", () => {
  running?.abort();
  [running, messages, attached] = [null, [], []];
  el.log.replaceChildren();
  showProblem("");
  showComposer();
  el.question.focus();
});
el.pick.addEventListener("click", () => el.files.click());
el.files.addEventListener("change", async () => { await attachFiles([...el.files.files]); el.files.value = ""; });
el["key-form"].addEventListener("submit", event => { event.preventDefault(); checkServer(); });
document.addEventListener("paste", event => {
  if (event.clipboardData.files.length) { event.preventDefault(); attachFiles([...event.clipboardData.files]); }
});
for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, event => {
  event.preventDefault();
  document.body.classList.toggle("dropping", kind === "dragover");
  if (kind === "drop") attachFiles([...event.dataTransfer.files]);
});
showComposer();
checkServer();
