-- Lmod modulefile of outcore: put it where your modules are, as outcore/0.1.0.lua.
-- `prefix` is a virtual environment into which outcore was installed.
local version = myModuleVersion()
local prefix = pathJoin("/opt/outcore", version)

help([[
outcore trains networks that do not fit, and fills the GPU with the ones that do.

    outcore demo
    srun outcore train run.yaml
]])

whatis("Name: outcore")
whatis("Version: " .. version)
whatis("Description: PyTorch training within memory budgets, on one device or many")
whatis("URL: https://pypi.org/project/outcore")

conflict("outcore")
prepend_path("PATH", pathJoin(prefix, "bin"))

-- One thread for each process unless the job says otherwise; files of memory that is moved go to the node's own disk.
if (os.getenv("OMP_NUM_THREADS") == nil) then
   setenv("OMP_NUM_THREADS", "1")
end
if (os.getenv("TMPDIR") ~= nil) then
   setenv("OUTCORE_SCRATCH", os.getenv("TMPDIR"))
end
