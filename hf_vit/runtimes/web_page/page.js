// The page: takes pictures, passes them to the worker and shows the answers. Names of classes and files are only ever
// set as text.
const TOP = 5;
const find = (id) => document.getElementById(id);

const page = await getJson("page.json");
const labels = new Map(); // folder of a model -> its class names
const worker = new Worker("worker.js", { type: "module" });
const shown = new Set(); // { file, article, request, answer }
const waiting = new Map(); // number of a request -> its entry of `shown`
let model; // the chosen entry of page.models
let requests = 0;
let failed = false;

async function getJson(name) {
  const response = await fetch(name).catch(() => ({}));
  if (!response.ok) {
    const reason = response.status ? `the server answered ${response.status}` : "check your network connection";
    say(`${name} could not be downloaded: ${reason}.`);
    throw new Error(name);
  }
  return response.json();
}

function say(text) {
  find("status").textContent = text;
}

navigator.serviceWorker?.register("service-worker.js").catch(() => {}); // without it the page needs a network

// The model

const programs = page.models.flatMap((model) => model.programs.map((program) => ({ ...program, model })));
for (const { name, bytes, model } of programs) {
  const owner = page.models.length > 1 ? `${model.name}, ` : "";
  find("programs").add(new Option(`${owner}${name} (${(bytes / 1e6).toFixed(1)} MB)`));
}
find("name").textContent = page.models.map(({ name }) => name).join(" and ");
document.title = document.querySelector("h1").textContent;
find("facts").textContent = page.models.map(({ name, facts }) => `${name}: ${facts}.`).join(" ");
find("programs").addEventListener("change", loadModel);
await loadModel();

async function loadModel() {
  const { selectedIndex, selectedOptions } = find("programs");
  const program = programs[selectedIndex];
  const { folder } = program.model;
  if (!labels.has(folder)) labels.set(folder, (await getJson(`${folder}config.json`)).id2label);
  const isOther = model !== program.model;
  model = program.model;
  failed = false;
  if (isOther) showChoices();
  say(`Loading the model, ${selectedOptions[0].text} …`);
  find("download").hidden = false;
  find("download").removeAttribute("value"); // unknown until the first part is there
  worker.postMessage({ model, file: folder + program.file });
  for (const entry of shown) ask(entry);
}

// Which classes are shown: the most likely, or those whose score reaches a threshold; none for a rejected picture.
function showChoices() {
  const { coverage } = model.thresholds;
  const rules = find("rule");
  const severalLabels = model.scores === "sigmoid";
  rules.replaceChildren(new Option(`the ${TOP} most likely classes`, "top"));
  if (severalLabels) rules.add(new Option("all classes that reach their threshold", "auto"));
  for (const share of Object.keys(coverage)) {
    rules.add(new Option(`a set that contains the right class ${+(100 * share).toFixed(1)}% of the time`, share));
  }
  rules.value = severalLabels ? "auto" : "top";
  find("rules").hidden = rules.length === 1;
  find("rejects").hidden = !model.thresholds.rejection;
  find("overlays").hidden = !model.attention;
}
for (const id of ["rule", "reject"]) {
  find(id).addEventListener("change", () => {
    for (const entry of shown) if (entry.answer) say(`${entry.name}: ${showClasses(entry)}.`);
  });
}

function chosenClasses({ logits, scores, order }) {
  const { rejection } = model.thresholds;
  if (rejection && find("reject").checked && logits[order[0]] < Math.fround(rejection[order[0]])) return [];
  const rule = find("rule").value;
  if (rule === "top") return order.slice(0, TOP);
  const { auto, coverage } = model.thresholds;
  return order.filter((index) => scores[index] >= (rule === "auto" ? (auto[index] ?? auto) : coverage[rule]));
}

worker.onerror = (event) => {
  failed = find("download").hidden = true;
  say(`The model could not be started: ${event.message || "worker.js or the runtime is missing"}.`);
};

worker.onmessage = ({ data: answer }) => {
  if (answer.downloaded) {
    find("download").value = answer.downloaded;
    return;
  }
  find("download").hidden = true;
  if (answer.ready) {
    say(waiting.size ? `Pictures to classify: ${waiting.size}.` : "Ready for pictures.");
  } else if (answer.id === undefined) {
    failed = true;
    say(answer.error);
  } else {
    const entry = waiting.get(answer.id);
    waiting.delete(answer.id);
    if (!shown.has(entry) || entry.request !== answer.id) return; // removed, or asked again
    if (answer.error) showError(entry, answer.error);
    else showAnswer(entry, answer);
  }
};

// Pictures

function classify(files) {
  for (const file of files) {
    const article = find("result").content.cloneNode(true).firstElementChild;
    const name = file.name || "picture";
    const entry = { file, article, name };
    article.querySelector("h2").textContent = name;
    article.querySelector("button").setAttribute("aria-label", `Remove ${name}`);
    article.querySelector("button").addEventListener("click", () => remove(entry));
    find("results").prepend(article);
    shown.add(entry);
    ask(entry);
  }
  if (files.length && !failed) say(`Pictures to classify: ${waiting.size}.`);
}

function ask(entry) {
  entry.request = requests++;
  entry.article.classList.add("waiting");
  entry.article.classList.remove("error");
  entry.article.querySelector("p").textContent = "waiting …";
  waiting.set(entry.request, entry);
  worker.postMessage({ id: entry.request, picture: entry.file });
}

function remove(entry) {
  const next = entry.article.nextElementSibling ?? entry.article.previousElementSibling;
  entry.article.remove();
  shown.delete(entry);
  (next?.querySelector("button") ?? find("files")).focus();
}

function takeChosen() {
  classify([...find("files").files]);
  find("files").value = ""; // or the same picture could not be chosen again
}
find("files").addEventListener("change", takeChosen);
takeChosen(); // while this page was loading
document.addEventListener("paste", ({ clipboardData }) => classify([...clipboardData.files]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  find("drop").classList.add("over");
});
document.addEventListener("dragleave", () => find("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").classList.remove("over");
  classify([...event.dataTransfer.files]);
});

for (const path of page.examples) {
  const name = path.split("/").pop();
  const button = document.createElement("button");
  const image = document.createElement("img");
  button.type = "button";
  image.src = path;
  image.alt = `Classify ${name}`;
  button.append(image);
  button.addEventListener("click", async () => {
    const picture = await (await fetch(path)).blob();
    classify([new File([picture], name, { type: picture.type })]);
  });
  find("examples").append(button);
  find("examples").hidden = false;
}
find("credits").textContent = page.credits;
find("credits").hidden = !page.credits;

// Answers

function showAnswer(entry, answer) {
  const { article, name } = entry;
  const { logits, scores, attention, milliseconds, width, height, thumbnail } = answer;
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]);
  entry.answer = { logits, scores, order };
  article.classList.remove("waiting");
  const { decoding, model } = milliseconds;
  article.querySelector("p").textContent =
    `${width} × ${height} pixels; ${Math.round(decoding)} ms to decode, ${Math.round(model)} ms for the model`;
  const [picture, overlay] = article.querySelectorAll("canvas");
  picture.setAttribute("aria-label", name);
  draw(picture, thumbnail);
  if (attention) drawAttention(overlay, attention, width, height, thumbnail);
  thumbnail.close();
  const first = showClasses(entry);
  say(`${name}: ${first}.${waiting.size ? ` Pictures to classify: ${waiting.size}.` : ""}`);
}

// Show the classes of a picture; return a text with the first one.
function showClasses({ article, answer }) {
  const { scores } = answer;
  const list = article.querySelector("ol");
  const classes = chosenClasses(answer);
  const names = labels.get(model.folder);
  list.replaceChildren();
  for (const index of classes) {
    const item = document.createElement("li");
    const label = document.createElement("span");
    const score = document.createElement("span");
    label.textContent = names[index];
    score.textContent = show(scores[index]);
    item.append(label, score);
    if (model.scores !== "none") {
      const bar = document.createElement("progress");
      bar.value = scores[index];
      bar.setAttribute("aria-hidden", "true"); // the number next to it is read instead
      item.append(bar);
    }
    list.append(item);
  }
  if (classes.length) return `${names[classes[0]]}, ${show(scores[classes[0]])}`;
  const none = document.createElement("li");
  none.textContent = "None of the classes.";
  list.append(none);
  return "none of the classes";
}

function show(score) {
  return model.scores === "none" ? score.toPrecision(4) : `${(100 * score).toFixed(1)}%`;
}

function showError(entry, error) {
  const { article, name } = entry;
  entry.answer = undefined;
  article.classList.replace("waiting", "error");
  article.querySelector("ol").replaceChildren();
  article.querySelector("p").textContent = error;
  say(`${name}: ${error}`);
}

function draw(canvas, bitmap) {
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
}

// Darken the picture where the model looks less, and outside its crop. Brightness grows with the square root of the
// attention, because on a linear scale a few patches would leave all others black.
function drawAttention(canvas, { values, grid }, width, height, thumbnail) {
  const [rows, columns] = grid;
  const [least, largest] = [Math.min(...values), Math.max(...values)];
  const small = new OffscreenCanvas(columns, rows);
  const image = new ImageData(columns, rows);
  values.forEach((value, index) => {
    image.data[4 * index + 3] = 255 * 0.85 * (1 - Math.sqrt((value - least) / (largest - least || 1)));
  });
  small.getContext("2d").putImageData(image, 0, 0);
  [canvas.width, canvas.height] = [thumbnail.width, thumbnail.height];
  const context = canvas.getContext("2d");
  const [x, y, seenWidth, seenHeight] = seenPart(width, height, canvas);
  context.fillStyle = "rgb(0 0 0 / 85%)";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.clearRect(x, y, seenWidth, seenHeight);
  context.imageSmoothingQuality = "high";
  context.drawImage(small, x, y, seenWidth, seenHeight);
}

// The part of the canvas that the crop leaves: [x, y, width, height].
function seenPart(width, height, canvas) {
  if (!model.crop) return [0, 0, canvas.width, canvas.height];
  const { size, crop_size: crop } = model.crop;
  const short = Math.min(width, height);
  const across = crop.width / (size.width ?? (size.shortest_edge * width) / short);
  const down = crop.height / (size.height ?? (size.shortest_edge * height) / short);
  const [w, h] = [across * canvas.width, down * canvas.height];
  return [(canvas.width - w) / 2, (canvas.height - h) / 2, w, h];
}

find("overlay").addEventListener("change", showOverlays);
function showOverlays() {
  find("results").classList.toggle("plain", !find("overlay").checked);
}
showOverlays();

// Camera

let stream;
find("camera").hidden = !navigator.mediaDevices;
find("camera").addEventListener("click", async () => {
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    say("The camera is not available: there is none, or access to it was denied.");
    return;
  }
  find("video").srcObject = stream;
  find("viewfinder").showModal();
});
find("shoot").addEventListener("click", async () => {
  const video = find("video");
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  canvas.getContext("2d").drawImage(video, 0, 0);
  const picture = await canvas.convertToBlob({ type: "image/png" });
  find("viewfinder").close();
  classify([new File([picture], "camera.png", { type: picture.type })]);
});
find("stop").addEventListener("click", () => find("viewfinder").close());
find("viewfinder").addEventListener("close", () => {
  for (const track of stream?.getTracks() ?? []) track.stop();
  find("video").srcObject = null;
});
