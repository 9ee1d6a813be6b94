// The site's own search outside of a browser: node search.js build/site QUESTION... prints a JSON list of result pages
// for each question, best first.
const fs = require("fs"), path = require("path"), vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const workers = path.join(site, "assets", "javascripts", "workers");
const script = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));

let listener, posted;
const self = { addEventListener: (_, added) => (listener = added), postMessage: (message) => posted(message), console };
Object.assign(self, { self, importScripts: () => {}, location: { href: "http://localhost/" }, URL });
vm.runInNewContext(fs.readFileSync(path.join(workers, script), "utf8"), self);

// Messages of the theme's worker: 0 sets up, 2 asks.
const ask = (type, data) => new Promise((done) => { posted = done; listener({ data: { type, data } }); });

(async () => {
  await ask(0, { config: index.config, docs: index.docs, options: { suggest: false } });
  const found = [];
  for (const question of questions) {
    const { data } = await ask(2, question);
    found.push(data.items.map((sections) => sections[0].location.split("#")[0]));
  }
  console.log(JSON.stringify(found));
})();
