// What pages show in headless Chromium: node measure.mjs WIDTH FILE|URL … prints a list as JSON.
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";
import { pathToFileURL } from "node:url";

const [width, ...places] = process.argv.slice(2);
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(),
  headless: "shell",
});

async function measure(place) {
  const address = place.startsWith("http:") ? place : pathToFileURL(place).href;
  const { origin } = new URL(address);
  const page = await browser.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("request", (request) => {
    if (/^https?:/.test(request.url()) && new URL(request.url()).origin !== origin)
      errors.push(request.url());
  });
  await page.setViewport({ width: Number(width), height: 900 });
  await page.goto(address, { waitUntil: "load" });
  await page.waitForFunction(
    () => [...document.querySelectorAll(".chart")].every((chart) => chart.querySelector(".main-svg")),
    { timeout: 60000 },
  );
  const shown = await page.evaluate(() => ({
    width: document.documentElement.scrollWidth,
    charts: Object.fromEntries(
      [...document.querySelectorAll(".chart")].map((chart) => [chart.id, chart.textContent]),
    ),
    text: document.body.innerText,
  }));
  await page.close();
  return { ...shown, errors };
}

const measured = [];
for (const place of places) measured.push(await measure(place));
console.log(JSON.stringify(measured));
await browser.close();
