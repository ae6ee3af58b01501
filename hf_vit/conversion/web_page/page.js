// The page: takes pictures, passes them to the worker and shows the answers. Names of classes and files are only ever
// set as text.
const TOP = 5;
const find = (id) => document.getElementById(id);

const settings = await getJson("page.json");
const labels = (await getJson("config.json")).id2label;
const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map(); // number of a picture -> its article
let pictures = 0;
let failed = false;

async function getJson(name) {
  const response = await fetch(name);
  if (!response.ok) {
    say(`The page cannot be loaded: ${name} gives ${response.status}.`);
    throw new Error(name);
  }
  return response.json();
}

function say(text) {
  find("status").textContent = text;
}

navigator.serviceWorker?.register("service-worker.js").catch(() => {}); // without it the page needs a network

// The model

for (const { name, file, bytes } of settings.programs) {
  find("programs").add(new Option(`${name} (${(bytes / 1e6).toFixed(1)} MB)`, file));
}
find("name").textContent = settings.name;
document.title = `Classify pictures with ${settings.name}`;
find("programs").addEventListener("change", loadModel);
loadModel();

function loadModel() {
  const { value: file, selectedOptions } = find("programs");
  failed = false;
  say(`Loading the model, ${selectedOptions[0].text} …`);
  worker.postMessage({ settings, file });
}

worker.onerror = (event) => {
  failed = true;
  say(`The model cannot be started: ${event.message || "worker.js or the runtime is missing"}.`);
};

worker.onmessage = ({ data: answer }) => {
  if (answer.ready) {
    say(waiting.size ? `Pictures to classify: ${waiting.size}.` : "Ready for pictures.");
  } else if (answer.id === undefined) {
    failed = true;
    say(answer.error);
  } else {
    const article = waiting.get(answer.id);
    waiting.delete(answer.id);
    if (answer.error) showError(article, answer.error);
    else showAnswer(article, answer);
  }
};

// Pictures

function classify(files) {
  for (const file of files) {
    const id = pictures++;
    const article = find("result").content.cloneNode(true).firstElementChild;
    article.dataset.name = file.name || "picture";
    article.querySelector("h2").textContent = article.dataset.name;
    article.querySelector("p").textContent = "waiting …";
    article.querySelector("button").setAttribute("aria-label", `Remove ${article.dataset.name}`);
    article.querySelector("button").addEventListener("click", () => remove(article));
    article.classList.add("waiting");
    find("results").prepend(article);
    waiting.set(id, article);
    worker.postMessage({ id, picture: file });
  }
  if (files.length && !failed) say(`Pictures to classify: ${waiting.size}.`);
}

function remove(article) {
  const next = article.nextElementSibling ?? article.previousElementSibling;
  article.remove();
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

// Answers

function showAnswer(article, { scores, attention, milliseconds, width, height, thumbnail }) {
  const name = article.dataset.name;
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]);
  article.classList.remove("waiting");
  const list = article.querySelector("ol");
  for (const index of order.slice(0, TOP)) {
    const item = document.createElement("li");
    const label = document.createElement("span");
    const score = document.createElement("span");
    label.textContent = labels[index];
    score.textContent = show(scores[index]);
    item.append(label, score);
    if (settings.scores !== "none") {
      const bar = document.createElement("progress");
      bar.value = scores[index];
      bar.setAttribute("aria-hidden", "true"); // the number beside it says the same
      item.append(bar);
    }
    list.append(item);
  }
  const { decoding, model } = milliseconds;
  article.querySelector("p").textContent =
    `${width} × ${height} pixels; ${Math.round(decoding)} ms to decode, ${Math.round(model)} ms for the model`;
  const [picture, overlay] = article.querySelectorAll("canvas");
  picture.setAttribute("aria-label", name);
  draw(picture, thumbnail);
  if (attention) drawAttention(overlay, attention, width, height, thumbnail);
  thumbnail.close();
  const best = order[0];
  say(`${name}: ${labels[best]}, ${show(scores[best])}.${waiting.size ? ` Pictures to classify: ${waiting.size}.` : ""}`);
}

function show(score) {
  return settings.scores === "none" ? score.toPrecision(4) : `${(100 * score).toFixed(1)} %`;
}

function showError(article, error) {
  article.classList.replace("waiting", "error");
  article.querySelector(".picture").remove();
  article.querySelector("p").textContent = error;
  say(`${article.dataset.name}: ${error}`);
}

function draw(canvas, bitmap) {
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
}

// Darken the picture where the model looks less, and where it looks not at all: outside its crop.
function drawAttention(canvas, { values, grid }, width, height, thumbnail) {
  const [rows, columns] = grid;
  const largest = Math.max(...values);
  const small = new OffscreenCanvas(columns, rows);
  const image = new ImageData(columns, rows);
  values.forEach((value, index) => {
    image.data[4 * index + 3] = 255 * 0.85 * (1 - value / largest);
  });
  small.getContext("2d").putImageData(image, 0, 0);
  [canvas.width, canvas.height] = [thumbnail.width, thumbnail.height];
  const context = canvas.getContext("2d");
  const [x, y, seenWidth, seenHeight] = seenPart(width, height, canvas);
  context.fillStyle = "rgb(0 0 0 / 85%)";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.clearRect(x, y, seenWidth, seenHeight);
  context.drawImage(small, x, y, seenWidth, seenHeight);
}

// The part of the canvas that the crop leaves: [x, y, width, height].
function seenPart(width, height, canvas) {
  if (!settings.crop) return [0, 0, canvas.width, canvas.height];
  const { size, crop_size: crop } = settings.crop;
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
    say("The camera cannot be used: there is none, or its use is not allowed.");
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
