// SPDX-License-Identifier: Apache-2.0
//! Writes what the released programs are made of: `cargo metadata ... | weft-components Cargo.lock SBOM LICENCES`. SBOM is a list of all
//! components in the format of CycloneDX 1.5, and LICENCES has the texts of their licences, as they lie in the sources that cargo has
//! downloaded. A library without such a file gets the text of its repository or of its licence. The same input gives the same bytes.
//! SOURCE_DATE_EPOCH is the time in the SBOM.

#![allow(clippy::print_stderr, reason = "a tool of the build says why it failed")]
#![allow(clippy::disallowed_methods, reason = "the environment has the time of the release")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

/// The text of Apache-2.0. It names no owner, so it is that of every library under this licence.
const APACHE: &str = include_str!("../../LICENSE");

/// The crates of the programs that are released.
const PROGRAMS: [&str; 2] = ["weft", "weft-cni"];

fn main() -> ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("weft-components: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn run() -> anyhow::Result<()> {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [lock, sbom, licences] = &paths[..] else {
        anyhow::bail!("usage: cargo metadata --format-version 1 | weft-components Cargo.lock SBOM LICENCES")
    };
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("read what cargo metadata says")?;
    let metadata: Value = serde_json::from_str(&text).context("read what cargo metadata says")?;
    let graph = Graph::of(&metadata)?;
    let sums = sums(&fs::read_to_string(lock).with_context(|| format!("read {}", lock.display()))?);
    let time = std::env::var("SOURCE_DATE_EPOCH").context("SOURCE_DATE_EPOCH")?.parse().context("SOURCE_DATE_EPOCH")?;
    let time = jiff::Timestamp::from_second(time).context("SOURCE_DATE_EPOCH")?;
    let list = serde_json::to_string_pretty(&graph.sbom(&sums, &time.to_string()))? + "\n";
    fs::write(sbom, list).with_context(|| format!("write {}", sbom.display()))?;
    fs::write(licences, graph.licences()?).with_context(|| format!("write {}", licences.display()))
}

/// Returns the sums of the sources, by name and version.
fn sums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
        line.and_then(|value| value.strip_suffix('"')).map(str::to_owned)
    };
    let blocks = lock.split("[[package]]");
    blocks.filter_map(|one| Some(((field(one, "name")?, field(one, "version")?), field(one, "checksum")?))).collect()
}

/// The crates in the programs, by their id.
struct Graph<'a> {
    crates: BTreeMap<&'a str, &'a Value>,
    needs: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

fn word<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn list<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    value[name].as_array().into_iter().flatten()
}

/// Returns where package tools find a crate.
fn purl(one: &Value) -> String {
    format!("pkg:cargo/{}@{}", word(one, "name"), word(one, "version"))
}

impl<'a> Graph<'a> {
    /// Follows what the programs need, without what only tests and build scripts need.
    fn of(metadata: &'a Value) -> anyhow::Result<Graph<'a>> {
        let known: BTreeMap<&str, &Value> = list(metadata, "packages").map(|one| (word(one, "id"), one)).collect();
        let nodes: BTreeMap<&str, &Value> =
            list(&metadata["resolve"], "nodes").map(|one| (word(one, "id"), one)).collect();
        let members: BTreeSet<&str> = list(metadata, "workspace_members").filter_map(Value::as_str).collect();
        let is_program = |one: &&Value| members.contains(word(one, "id")) && PROGRAMS.contains(&word(one, "name"));
        let mut waiting: Vec<&str> = known.values().copied().filter(is_program).map(|one| word(one, "id")).collect();
        ensure!(waiting.len() == PROGRAMS.len(), "cargo metadata does not have {PROGRAMS:?}");
        let mut graph = Graph { crates: BTreeMap::new(), needs: BTreeMap::new() };
        while let Some(id) = waiting.pop() {
            if graph.crates.insert(id, known.get(id).with_context(|| format!("{id} is unknown"))?).is_some() {
                continue;
            }
            let is_inside = |need: &&Value| list(need, "dep_kinds").any(|kind| kind["kind"].is_null());
            let node = nodes.get(id).with_context(|| format!("{id} was not resolved"))?;
            let needs: BTreeSet<&str> = list(node, "deps").filter(is_inside).map(|need| word(need, "pkg")).collect();
            waiting.extend(&needs);
            graph.needs.insert(id, needs);
        }
        Ok(graph)
    }

    /// Returns the crates that are not ours, by name and version.
    fn libraries(&self) -> Vec<&'a Value> {
        let mut all: Vec<&Value> = self.crates.values().copied().filter(|one| !one["source"].is_null()).collect();
        all.sort_by_key(|one| (word(one, "name"), word(one, "version")));
        all
    }

    fn sbom(&self, sums: &BTreeMap<(String, String), String>, time: &str) -> Value {
        let components: Vec<Value> = self.libraries().into_iter().map(|one| component(one, sums)).collect();
        let reference = |id: &str| purl(self.crates[id]);
        let mut needs: Vec<Value> = Vec::new();
        for (id, below) in &self.needs {
            let mut below: Vec<String> = below.iter().map(|id| reference(id)).collect();
            below.sort();
            needs.push(json!({"ref": reference(id), "dependsOn": below}));
        }
        needs.sort_by_key(|one| word(one, "ref").to_owned());
        let own = |one: &&Value| one["source"].is_null();
        let mut ours: Vec<Value> =
            self.crates.values().filter(|one| own(one)).map(|one| component(one, sums)).collect();
        ours.sort_by_key(|one| word(one, "bom-ref").to_owned());
        let version = env!("CARGO_PKG_VERSION");
        json!({
            "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {
                "timestamp": time,
                "component": {
                    "type": "application", "bom-ref": "weft-release", "name": "weft", "version": version,
                    "licenses": [{"expression": "Apache-2.0"}], "components": ours,
                },
            },
            "components": components,
            "dependencies": needs,
        })
    }

    /// Returns the texts. Crates with the same text share it.
    fn licences(&self) -> anyhow::Result<String> {
        let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut out = String::from(
            "The programs weft and weft-cni contain these libraries. weft itself is licensed under Apache-2.0.\n\n",
        );
        let libraries = self.libraries();
        for one in &libraries {
            let called = format!("{} {}", word(one, "name"), word(one, "version"));
            ensure!(!word(one, "license").is_empty(), "{called} does not say its licence");
            writeln!(out, "{called}: {}", word(one, "license"))?;
            for text in texts_of(one, &libraries)? {
                texts.entry(text).or_default().push(called.clone());
            }
        }
        let mut by_crates: Vec<(String, String)> = texts.into_iter().map(|(text, of)| (of.join(", "), text)).collect();
        by_crates.sort();
        for (of, text) in by_crates {
            write!(out, "\n{}\n{of}\n\n{}\n", "=".repeat(80), text.trim_end())?;
        }
        Ok(out)
    }
}

fn component(one: &Value, sums: &BTreeMap<(String, String), String>) -> Value {
    let (name, version) = (word(one, "name"), word(one, "version"));
    let mut component = json!({
        "type": "library", "bom-ref": purl(one), "name": name, "version": version, "purl": purl(one), "scope": "required",
        // Older crates write a slash for "or".
        "licenses": [{"expression": word(one, "license").replace('/', " OR ")}],
    });
    if let Some(sum) = sums.get(&(name.to_owned(), version.to_owned())) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    component
}

/// Returns the texts that belong to a library: those in its sources, or else those of another library of the same repository and licence, or
/// else the text of Apache-2.0 where this is its licence.
fn texts_of(one: &Value, libraries: &[&Value]) -> anyhow::Result<Vec<String>> {
    let own = texts_beside(one)?;
    if !own.is_empty() {
        return Ok(own);
    }
    let is_sibling = |other: &Value| {
        !word(one, "repository").is_empty()
            && ["repository", "license"].iter().all(|field| word(one, field) == word(other, field))
    };
    for sibling in libraries.iter().filter(|other| is_sibling(other)) {
        let texts = texts_beside(sibling)?;
        if !texts.is_empty() {
            return Ok(texts);
        }
    }
    let licence = word(one, "license").replace('/', " OR ");
    let called = format!("{} {}", word(one, "name"), word(one, "version"));
    ensure!(
        licence.split(" OR ").any(|choice| choice.trim() == "Apache-2.0"),
        "{called} ({licence}) has no file with its licence, and neither has another library of its repository"
    );
    Ok(vec![APACHE.to_owned()])
}

/// Returns the licences and notices in the sources of a library.
fn texts_beside(one: &Value) -> anyhow::Result<Vec<String>> {
    let dir = Path::new(word(one, "manifest_path")).parent().context("a manifest without a directory")?;
    texts_in(dir).with_context(|| format!("read {}", dir.display()))
}

/// Returns the files of a directory that contain a licence or a notice.
fn texts_in(dir: &Path) -> std::io::Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && ["LICEN", "COPYING", "NOTICE", "COPYRIGHT"].iter().any(|head| name.starts_with(head)) {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| fs::read(path).map(|text| String::from_utf8_lossy(&text).replace("\r\n", "\n"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the sources of a library, with its licence if there is a text.
    fn library(place: &Path, name: &str, repository: &str, licence: &str, text: Option<&str>) -> Value {
        let dir = place.join(name);
        fs::create_dir(&dir).unwrap();
        if let Some(text) = text {
            fs::write(dir.join("LICENSE"), text).unwrap();
        }
        let manifest = dir.join("Cargo.toml");
        json!({
            "name": name, "version": "1.0.0", "license": licence, "repository": repository,
            "manifest_path": manifest.to_str().unwrap(),
        })
    }

    #[test]
    fn every_library_has_the_text_of_its_licence() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name, repository, licence, text| library(dir.path(), name, repository, licence, text);
        let whole = make("tonic", "https://x/grpc", "MIT", Some("MIT of grpc"));
        let part = make("tonic-prost", "https://x/grpc", "MIT", None);
        let other = make("tonic-other", "https://x/grpc", "ISC", None);
        let apache = make("kube", "https://x/kube", "MIT/Apache-2.0", None);
        let alone = make("alone", "", "MIT", None);
        let nowhere = make("nowhere", "", "MIT", Some("MIT of nowhere"));
        let all = [&whole, &part, &other, &apache, &alone, &nowhere];
        assert_eq!(texts_of(&whole, &all).unwrap(), ["MIT of grpc"]);
        assert_eq!(texts_of(&part, &all).unwrap(), ["MIT of grpc"]);
        assert_eq!(texts_of(&apache, &all).unwrap(), [APACHE]);
        let error = texts_of(&other, &all).unwrap_err().to_string();
        assert!(error.contains("tonic-other 1.0.0 (ISC) has no file with its licence"), "{error}");
        assert!(texts_of(&alone, &all).is_err(), "libraries without a repository have none in common");
    }
}
